"""The benchmarks page says what its JSON says, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ridethrough.bench.page import page
from ridethrough.bench.page_plots import Bar, bars

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_files() -> None:
    made = page(DOCS / "benchmarks")
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == made.text, "`ridethrough bench page`"
    plots = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "benchmarks" / "plots").iterdir()}
    assert plots == made.plots, "`ridethrough bench page`"
    assert all(f"(benchmarks/plots/{name})" in made.text for name in plots)


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
    made = page(tmp_path)
    text = made.text
    (ours,) = [line for line in text.splitlines() if line.startswith("| ridethrough |")]
    assert ours.endswith("| 0.500 | 3.0 |")
    assert "**Preliminary:** a busy machine" in text and "not measured: x: none" in text and "`cafe`" in text
    (drawing,) = made.plots.values()
    assert [bar.get("class") for bar in ElementTree.fromstring(drawing).iter(f"{SVG}rect")][1:] == ["r", "o"]
    assert "6 s" in drawing and "logarithmic" not in drawing


def test_an_axis_is_logarithmic_where_a_linear_one_would_hide_the_small() -> None:
    drawing = ElementTree.fromstring(bars("t", [Bar("a & b", 0.04), Bar("c", 300.0, high=400.0)], "s"))
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert texts[0] == "t (logarithmic)" and "a & b" in texts
    assert [text for text in texts if text in ("0.01 s", "0.1 s", "1 s", "10 s", "100 s", "1000 s")][-1] == "1000 s"
    short, long = [float(bar.get("width", 0)) for bar in drawing.iter(f"{SVG}rect")][1:]
    assert long / short == pytest.approx(math.log10(300 / 0.01) / math.log10(0.04 / 0.01), rel=0.01)


def test_a_file_of_no_known_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json"):
        page(tmp_path)
