"""Following a run, and the lines that tell what happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import around, worked_case

from ridethrough.ledger.compact import compact
from ridethrough.ledger.recorder import Recorder
from ridethrough.report.progress import Progress
from ridethrough.report.tail import Follower


def test_only_new_whole_lines_are_read(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.poll() == []
    with Recorder(tmp_path, "worker") as one, Recorder(tmp_path, "agent") as two:
        one.emit("enter", generation=0, rank=0, t_ns=20)
        two.emit("plan", generation=0, t_ns=10)
        assert [e["kind"] for e in follower.poll() if e["kind"] != "header"] == ["plan", "enter"]
        assert follower.poll() == []
        assert one.path is not None
        with one.path.open("a") as half:
            half.write('{"t_ns": 30, "ki')
        assert follower.poll() == []
        with one.path.open("a") as half:
            half.write('nd": "loop"}\nnot json\n')
        (event,) = follower.poll()
        assert (event["kind"], event["role"], event["t_ns"]) == ("loop", "worker", 30)


def test_progress_tells_fault_and_recovery_as_they_come() -> None:
    events = sorted([*around(), *worked_case()], key=lambda e: e["t_ns"])
    for e in events:
        if e["kind"] == "step":
            e.update(loss=2.5, tokens=100)
    progress = Progress(total=10)
    cut = next(n for n, e in enumerate(events) if e["kind"] == "fault")
    assert progress.update(events[:cut]) == []
    assert progress.line() == "step 7/10  loss 2.5000  100 tokens/s  generation 0"
    lines = progress.update(events[cut : cut + 1])
    assert lines == [
        "fault: exception on rank 0, forward of step 8 (injected: 0), seen by exception after 0.50 s; generation 0 ends"
    ]
    assert progress.line().endswith("incidents 1  recovering")
    assert progress.update(events[cut + 1 :]) == [
        "recovered: first step 6.00 s after the fault, resumed at step 4, 3 steps lost"
    ]
    assert progress.line() == "step 10/10  loss 2.5000  100 tokens/s  generation 1  incidents 1"
    assert progress.ended is not None and progress.ended["code"] == 0


def test_a_file_that_becomes_a_block_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.ledger.compact.SMALLEST_BYTES", 0)
    follower = Follower(tmp_path)
    with Recorder(tmp_path, "worker") as recorder:
        recorder.emit("x", i=0)
        assert [e.get("i") for e in follower.poll()] == [None, 0]
        recorder.emit("x", i=1)
    assert len(compact(tmp_path)) == 1
    assert [e["i"] for e in follower.poll()] == [1]
    assert follower.poll() == []
    assert [e.get("i") for e in Follower(tmp_path).poll()] == [None, 0, 1]
