"""The benchmarks page says what its JSON says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridethrough.bench.page import page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_files() -> None:
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == page(DOCS / "benchmarks"), "`ridethrough bench page`"


def environment() -> dict[str, Any]:
    workload = {"world_size": 4, "timeout_s": 10, "save_every": 4, "clock_factor": 6, "dim": 512, "layers": 5}
    return {
        "machine": {"cpus_usable": 2, "memory_bytes": 8e9},
        "versions": {"ridethrough": "0", "python": "3", "torch": "2"},
        "gpus": {"devices": []},
        "workload": workload,
        "peers": {},
    }


def test_ours_being_slower_is_said(tmp_path: Path) -> None:
    row = dict.fromkeys(("detected_s", "all_out_s", "caught_up_s", "load_s"), 0.5)
    counts = dict.fromkeys(("steps_lost", "attempts", "failed_attempts", "processes_replaced", "container_restarts"), 1)
    row |= {**counts, "rep": 0, "fault": "sigkill", "final_equal": True, "error": None, "load_1min": 0.1}
    row |= {"training_goodput": 0.25, "infrastructure_goodput": 0.5}
    rows = [
        {**row, "mechanism": "ridethrough", "first_step_s": 6.0},
        {**row, "mechanism": "torchrun", "first_step_s": 2.0},
    ]
    content = {"kind": "recovery", "begun": "2030-01-01T00:00:00", "environment": environment(), "results": rows}
    content |= {
        "schedule_hash": "cafe",
        "preliminary": "a busy machine",
        "missing": [{"mechanism": "x", "error": "none"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(content))
    text = page(tmp_path)
    (ours,) = [line for line in text.splitlines() if line.startswith("| ridethrough |")]
    assert ours.endswith("| 0.500 | 3.0 |")
    assert "**Preliminary:** a busy machine" in text and "not measured: x: none" in text and "`cafe`" in text


def test_a_file_of_no_known_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json"):
        page(tmp_path)
