"""A simulation with the times of a measured run has that run's course."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import S, around, event, worked_case, write

from ridethrough.bench.simulation import simulate
from ridethrough.bench.simulation_model import Planned, from_json, with_times
from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.measured_times import measured_times

CASE = {
    "fleet": {"num_gpus": 1, "gpus_per_node": 1, "total_steps": 10},
    "mechanism": {
        "name": "mine",
        "rungs": True,
        "times": {"step_s": 60.0, "launch_s": 90.0, "detect_s": {"exception": 30.0, "hang": 16.0}},
        "saving": {"mode": "sync", "interval": 4},
    },
}


def test_the_measured_run_is_foretold(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={}, command=[], schedule_hash=None)
    decided = {
        "id": "0.0",
        "class": "exception",
        "rank": 0,
        "host": "h",
        "phase": "forward",
        "step": 8,
        "secondary": [],
    }
    decided |= {"rung": "in_process", "detected_by": "exception", "attempts": 1, "root_cause": "boom", "generation": 0}
    decided |= {"declared_ns": 8 * S, "fault_ns": 7_400_000_000, "all_out_ns": 9 * S, "secondary": []}
    coordinator = sorted([*around(), event("incident", 9.2, **decided)], key=lambda each: each["t_ns"])
    write(run.path, "h-coordinator-1", coordinator)
    write(run.path, "h-worker-2", sorted(worked_case(), key=lambda each: each["t_ns"]))
    ledger = read_run(run.path)
    times = measured_times([ledger])
    assert times["step_s"] == 1.0 and times["detect_s"].keys() == {"exception"}
    case = with_times(CASE, times)
    assert case["mechanism"]["times"]["detect_s"]["hang"] == 16.0, "what was not measured stays"
    assert CASE["mechanism"]["times"]["step_s"] == 60.0
    fleet, mechanism = from_json(case)
    outcome = simulate(fleet, mechanism, planned=[Planned(8, "exception", into_s=0.5)])
    measured = {state: ns / 1e9 for state, ns in ledger.part.states_ns.items()}
    assert {**dict.fromkeys(measured, 0.0), **outcome.states_s} == pytest.approx(measured, abs=0.01)
    assert outcome.wall_s == pytest.approx(18.5, abs=0.01)
