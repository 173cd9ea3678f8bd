"""The table of events: checks lines, prints as JSON Schema, and is what the documentation shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ridethrough.ledger.schema import KINDS, STATES, UP, json_schema, problems

DOCS = Path(__file__).parents[2] / "docs" / "ledger.md"


def test_problems_are_named() -> None:
    good = {"t_ns": 1, "kind": "loop", "generation": 0, "rank": 1, "step": 4, "more": "ignored"}
    assert problems(good) == []
    assert problems({"t_ns": 1, "kind": "of a later version"}) == []
    assert problems({"kind": "loop", "generation": 0, "rank": True}) == [
        "t_ns is no integer",
        "loop.rank is True, not int",
        "loop.step is missing",
    ]
    assert problems({**good, "kind": "phase", "phase": "load", "edge": "middle"}) == [
        "phase.edge is 'middle', not one of begin, end"
    ]


def test_json_schema_has_every_kind_and_state() -> None:
    schema = json_schema()
    assert [kind["title"] for kind in schema["oneOf"]] == list(KINDS)
    assert {name for name, state in schema["x-states"].items() if state["up"]} == UP
    step = next(kind for kind in schema["oneOf"] if kind["title"] == "step")
    assert step["properties"]["t0_ns"]["type"] == "integer" and "loss" not in step["required"]


def test_the_documentation_has_every_state_kind_and_field() -> None:
    text = DOCS.read_text()
    rows = {row[1]: row[0] for row in re.finditer(r"^\| `(\w+)` \|.*$", text, re.MULTILINE)}
    assert set(STATES) | set(KINDS) <= set(rows)
    for name, kind in KINDS.items():
        assert [field for field in kind.fields if f"`{field}`" not in rows[name]] == []


def test_reading_and_reporting_never_import_torch() -> None:
    rooms = "ridethrough.ledger.summary, ridethrough.report.html, ridethrough.report.tail"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
