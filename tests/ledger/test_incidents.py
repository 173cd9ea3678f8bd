"""Incidents: stages that add up, what was lost, and who is to blame; and the summary's JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import S, around, event, fault, step, worked_case, write

from ridethrough.ledger.incidents import by_class, incidents, percentile
from ridethrough.ledger.rundir import RunDirError, create_run
from ridethrough.ledger.schema import STAGES
from ridethrough.ledger.summary import summary


def incident(t_s: float = 9.5, **fields: object) -> dict:
    known = {
        "id": "i1",
        "class": "exception",
        "rank": 0,
        "host": "h",
        "phase": "forward",
        "step": 8,
        "generation": 0,
        "rung": "in_process",
        "detected_by": "exception",
        "attempts": 1,
        "root_cause": "Traceback ...\nRuntimeError: boom",
        "declared_ns": 8 * S,
        "fault_ns": None,
        "all_out_ns": 9 * S,
        "secondary": [{"rank": 1, "class": "collective", "cause": "reset"}],
    }
    return event("incident", t_s, **{**known, **fields})


def test_the_worked_case_stage_by_stage() -> None:
    (found,) = incidents([*around(), *worked_case(), incident()])
    assert (found.id, found.class_, found.rung, found.attempts) == ("i1", "exception", "in_process", 1)
    assert found.stages_s == {
        "detect": 0.5,
        "teardown": 1.0,
        "rebuild": 1.0,
        "init": 1.5,
        "restore": 1.0,
        "first_step": 1.0,
    }
    assert list(found.stages_s) == STAGES
    assert (found.detected_s, found.all_out_s, found.first_step_s) == (0.5, 1.5, 6.0)
    assert (found.resumed_at, found.steps_lost, found.caught_up_s) == (4, 3, 8.0)  # step 7 done again at 15.5
    assert found.as_json()["class"] == "exception" and found.recovered
    assert found.secondary[0]["class"] == "collective"
    assert found.as_json()["injected"] == ["0"]


def test_a_planned_fault_is_joined_by_its_id_unless_the_rank_went_on_after_it() -> None:
    """One of two ranks gets over a fault of its own (a slow step) before the other one's ends the generation."""
    survived = event("fault_injected", 2.5, generation=0, rank=1, id="slow", fault_kind="slow", phase="step", step=3)
    peer = [e for e in worked_case(1) if e["kind"] != "fault_injected"]
    (found,) = incidents([*around(2), *worked_case(), *peer, survived, incident()])
    assert found.injected == ["0"]
    real = [e for e in (*around(), *worked_case(), incident()) if e["kind"] != "fault_injected"]
    assert incidents(real)[0].injected == []


def test_without_the_coordinators_word_the_reports_tell() -> None:
    cut = fault(7.9, rank=1, **{"class": "collective"})
    (found,) = incidents([*around(), cut, *worked_case()])
    assert (found.class_, found.rank, found.rung, found.id) == ("exception", 0, None, "open-0-0")
    assert [(s["rank"], s["class"]) for s in found.secondary] == [(1, "collective")]
    assert found.root_cause == "boom"


def test_stages_follow_the_last_rank_and_sum_to_the_first_step() -> None:
    late = [e for e in worked_case(1) if e["kind"] != "fault_injected"]
    for e in late:
        if e["generation"] == 1:
            for name in ("t_ns", "t0_ns", "t1_ns"):
                if name in e:
                    e[name] += S // 4
    (found,) = incidents([*around(2), *worked_case(), *late, incident()])
    assert found.first_step_s == 6.25 == sum(found.stages_s.values())
    assert found.stages_s["rebuild"] == 1.25


def test_a_fault_before_the_first_new_step_belongs_to_the_incident() -> None:
    again = [
        fault(12.3, generation=1, fault_ns=12_250_000_000),
        event("all_out", 12.4, generation=1),
        event("enter", 12.6, generation=2, rank=0),
        event("loop", 12.6, generation=2, rank=0, step=4),
        *(step(12.6 + n - 5, 12.6 + n - 4, n, generation=2) for n in range(5, 9)),
    ]
    events = [e for e in [*around(), *worked_case()] if e["t_ns"] <= 12 * S] + again
    (found,) = incidents([*events, incident(), incident(12.5, generation=1, rung="replace_process", attempts=2)])
    assert (found.rung, found.attempts, found.resumed_generation) == ("replace_process", 2, 2)
    assert found.first_step_s == pytest.approx(13.6 - 7.5)
    (guessed,) = incidents(events)  # also when no incident was written
    assert guessed.attempts == 2


def test_faults_while_catching_up_are_their_own_incidents() -> None:
    second = [
        fault(14.8, generation=1, step=7, fault_ns=14_700_000_000),
        event("all_out", 15, generation=1),
        event("enter", 16, generation=2, rank=0),
        event("resumed", 16, generation=2, rank=0, step=4, tier="disk", source="x"),
        event("loop", 16, generation=2, rank=0, step=4),
        *(step(16 + n - 5, 16 + n - 4, n, generation=2) for n in range(5, 9)),
    ]
    events = [e for e in [*around(), *worked_case()] if e["t_ns"] <= 14.6 * S]
    one, two = incidents([*events, *second])
    assert (one.steps_lost, one.caught_up_s) == (3, 19 - 7.5)  # step 7 only in the third generation
    assert (two.steps_lost, two.caught_up_s) == (2, pytest.approx(18 - 14.7))


def test_a_run_that_gave_up_has_an_incident_that_is_not_recovered() -> None:
    events = [e for e in [*around(), *worked_case()] if e["t_ns"] <= 9 * S]
    (found,) = incidents([*events, incident(9.2, rung="give_up"), event("job_end", 9.5, code=80, reason="x")])
    assert not found.recovered and found.first_step_s is None and found.resumed_at is None
    assert list(found.stages_s) == ["detect", "teardown"]
    assert by_class([found])["exception"]["recovery_rate"] == 0.0


def test_percentiles_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1.0


def test_summary_is_the_json_of_the_commands(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={"steps": 10}, command=["x"], schedule_hash="s")
    final = event("final", 18.5, generation=1, rank=0, final_hash="f00", final_loss=1.25, val_loss=1.5)
    write(run.path, "h-coordinator-1", [*around(), incident()])
    write(run.path, "h-worker-2", [*worked_case(), final])
    data = summary(run.path, control_hash="f00")
    assert data["bitwise_equal"] is True and data["control_hash"] == data["final_hash"] == "f00"
    assert summary(run.path)["bitwise_equal"] is None
    assert summary(run.path, control_hash="bad")["bitwise_equal"] is False
    assert (data["steps"], data["final_loss"], data["schedule_hash"]) == (10, 1.25, "s")
    assert sum(data["ledger"]["states_ns"].values()) == data["ledger"]["wall_ns"] * data["ledger"]["slots"]
    assert data["training_goodput"] == pytest.approx(0.5405, abs=5e-5)
    assert data["incidents"][0]["stages_s"]["detect"] == 0.5
    assert data["classes"]["all"] == {
        "count": 1,
        "recovery_rate": 1.0,
        "p50_s": 6.0,
        "p95_s": 6.0,
        "p99_s": 6.0,
        "max_s": 6.0,
    }
    with pytest.raises(RunDirError):
        summary(tmp_path)
