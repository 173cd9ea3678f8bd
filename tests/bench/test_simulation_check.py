"""The check of the simulation: against runs whose times are known, and a machine that was slow once."""

from __future__ import annotations

from typing import Any

from ridethrough.bench.simulation_check import check

STATES = {"launch": 20.0, "init": 2.0, "restore": 1.0, "step": 10.0, "lost_step": 1.0, "partial_step": 0.4}
STATES |= {"detect": 1.0, "teardown": 0.5, "rebuild": 8.0, "finish": 4.0, "snapshot_stall": 0.2}


def measured(rep: int, **changed: float) -> dict[str, Any]:
    """A launcher's run of 10 steps of 1 s on 1 rank: a save every 4 steps, an exception in step 6, one step lost."""
    stages = {"detect": 1.0, "teardown": 0.5, "rebuild": 8.0}
    about = {"mechanism": "torchrun", "fault": "exception", "rep": rep, "error": None, "first_step_s": 12.5}
    return {**about, "states_s": {**STATES, **changed}, "stages_s": stages, "steps_lost": 1, "resumed_at": 4}


def checked(*runs: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    size = {"world_size": 1, "steps": 10, "save_every": 4}
    faults = [{"id": f"exception-{run['rep']}", "step": 6} for run in runs]
    rows = check({"environment": {"workload": size}, "schedule": {"faults": faults}, "results": runs})
    return {(row["rep"], row["state"]): row for row in rows}


def test_runs_that_repeat_are_foretold() -> None:
    rows = checked(measured(0), measured(1), measured(2))
    assert len(rows) >= 3 * len(STATES)
    assert all(row["agrees"] and row["repeats"] and row["course_agrees"] for row in rows.values())


def test_what_only_the_machine_did_is_not_the_simulations_fault() -> None:
    rows = checked(measured(0), measured(1), measured(2, launch=30.0), measured(3))
    slow = rows[2, "launch"]
    assert not slow["agrees"] and not slow["repeats"] and slow["course_agrees"]
    assert [key for key, row in rows.items() if not row["agrees"]] == [(2, "launch")]


def test_a_course_that_is_not_the_jobs_is_found() -> None:
    """Five steps lost where the last save allows one: no simulation of this job loses them."""
    rows = checked(measured(0, lost_step=5.0), measured(1, lost_step=5.0))
    assert not rows[0, "lost_step"]["agrees"] and rows[0, "lost_step"]["repeats"]
    assert not rows[0, "lost_step"]["course_agrees"]
