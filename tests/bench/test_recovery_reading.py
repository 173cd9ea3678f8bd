"""The measures of a run, from hand-made events of a workload."""

from __future__ import annotations

from typing import Any

import pytest

from ridethrough.bench.recovery_reading import final, measures
from ridethrough.bench.spread import median, recovery_table

S = 1_000_000_000
WORLD = 2


def step(rank: int, generation: int, number: int, begin_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    event = {"kind": "step", "t_ns": round(end_s * S), "rank": rank, "generation": generation, "step": number}
    return {**event, "t0_ns": round(begin_s * S), "t1_ns": round(end_s * S), "parts": [], "file": str(rank), **more}


def event(kind: str, rank: int, generation: int, at_s: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "t_ns": round(at_s * S),
        "rank": rank,
        "generation": generation,
        "file": str(rank),
        "role": "worker",
        **more,
    }


def lived(rank: int, file: str, pid: int, at_s: float) -> list[dict[str, Any]]:
    header = {"kind": "header", "t_ns": round(at_s * S), "pid": pid, "file": file, "role": "worker"}
    return [header, {**event("process", rank, 0, at_s), "file": file, "pid": pid}]


def killed() -> list[dict[str, Any]]:
    """Two ranks; rank 1 dies at 5.5 s in step 3, rank 0 leaves at 5.7; both again at 8 s, from step 1."""
    events = lived(0, "0", 10, 0.5) + lived(1, "1", 11, 0.5) + lived(1, "1b", 12, 6.0)
    for rank in range(WORLD):
        second = "1b" if rank else "0"
        events += [event("enter", rank, 900, 2), event("resumed", rank, 900, 2.5, step=0)]
        events += [event("loop", rank, 900, 3, step=0), step(rank, 900, 1, 3, 4), step(rank, 900, 2, 4, 5)]
        after = [event("enter", rank, 901, 8), event("phase", rank, 901, 8, phase="load", edge="begin", step=0)]
        after += [event("phase", rank, 901, 8.5, phase="load", edge="end", step=1)]
        after += [event("resumed", rank, 901, 8.5, step=1), event("loop", rank, 901, 9, step=1)]
        after += [step(rank, 901, 2, 9, 10), step(rank, 901, 3, 10, 11), event("finish", rank, 901, 11, step=3)]
        events += [{**e, "file": second} for e in after]
    events.append(event("fault_injected", 1, 900, 5.5, id="f", fault_kind="sigkill", phase="forward", step=3))
    events.append(event("leave", 0, 900, 5.7, cause="RuntimeError"))
    events.append({**event("final", 0, 901, 11.5), "final_hash": "ab", "final_loss": 1.0})
    return sorted(events, key=lambda e: e["t_ns"])


def test_a_killed_rank_by_the_ledgers_rules() -> None:
    row = measures(killed(), {11: round(5.52 * S)}, WORLD, 0, 12 * S)
    assert row["detected_s"] == pytest.approx(0.2), "the first other rank that left, not the death itself"
    assert row["all_out_s"] == pytest.approx(0.2)
    assert row["first_step_s"] == pytest.approx(4.5)
    assert row["caught_up_s"] == pytest.approx(4.5)
    assert (row["steps_lost"], row["resumed_at"]) == (1, 1)
    assert (row["attempts"], row["failed_attempts"], row["processes_replaced"]) == (1, 0, 1)
    assert row["load_s"] == pytest.approx(0.5)
    assert row["training_goodput"] == pytest.approx(3 / 12), "steps 1, 2 and 3 once each"
    assert row["states_s"]["lost_step"] == pytest.approx(2.0)
    assert sum(row["states_s"].values()) == pytest.approx(24.0)
    assert final(killed()) == ("ab", 1.0)


@pytest.mark.parametrize(("waits_since_s", "expected"), [(None, None), (5.6, None), (5.4, 0.2)])
def test_out_of_the_collective_counts_only_who_was_in_it(waits_since_s: float | None, expected: float | None) -> None:
    waiting_ns = round(waits_since_s * S) if waits_since_s else None
    events = [{**e, "waiting_ns": waiting_ns} if e["kind"] == "leave" else e for e in killed()]
    row = measures(events, {11: round(5.52 * S)}, WORLD, 0, 12 * S)
    assert row["collective_out_s"] == (expected if expected is None else pytest.approx(expected))


def test_a_job_that_never_came_back_has_no_times() -> None:
    events = [e for e in killed() if e.get("generation") != 901 and e["file"] != "1b"]
    row = measures(events, {11: round(5.52 * S), 10: 6 * S}, WORLD, 0, 12 * S)
    assert (row["first_step_s"], row["caught_up_s"], row["steps_lost"]) == (None, None, None)
    assert row["detected_s"] == pytest.approx(0.2)


def test_without_a_fault_only_the_goodput_is_said() -> None:
    events = [e for e in killed() if e.get("generation") != 901 and e["kind"] not in ("fault_injected", "leave")]
    events += [event("finish", rank, 900, 5, step=2) for rank in range(WORLD)]
    row = measures(sorted(events, key=lambda e: e["t_ns"]), {}, WORLD, 0, 6 * S)
    assert row["first_step_s"] is None and row["attempts"] == 0
    assert row["training_goodput"] == pytest.approx(2 / 6)


def test_torchft_goes_on_without_the_dead_one() -> None:
    """Nobody agrees on generations (all 0): the dropped step and the return begin the next."""
    events = lived(0, "0", 10, 0.5) + lived(1, "1", 11, 0.5) + lived(1, "1b", 12, 6.0)
    for rank in range(WORLD):
        events += [event("enter", rank, 0, 2), event("loop", rank, 0, 3, step=0), step(rank, 0, 1, 3, 4)]
    events.append(event("fault_injected", 1, 0, 4.5, id="f", fault_kind="sigkill", phase="forward", step=2))
    events += [event("leave", 0, 0, 5.0, cause="the step was dropped"), step(0, 0, 2, 5, 6), step(0, 0, 3, 6, 7)]
    back = [event("enter", 1, 0, 7.2), event("loop", 1, 0, 7.3, step=0), step(1, 0, 4, 7.5, 8)]
    events += [{**e, "file": "1b"} for e in back]
    events += [
        step(0, 0, 4, 7.5, 8),
        event("finish", 0, 0, 8, step=4),
        {**event("finish", 1, 0, 8, step=4), "file": "1b"},
    ]
    row = measures(sorted(events, key=lambda e: e["t_ns"]), {11: round(4.52 * S)}, WORLD, 0, 9 * S)
    assert row["all_out_s"] == pytest.approx(0.5)
    assert row["first_step_s"] == pytest.approx(1.5), "the survivor's next step that counted"
    assert row["states_s"]["degraded"] > 0


def test_the_table_says_median_tail_and_ratio_to_the_fastest() -> None:
    common = {"final_equal": True, "training_goodput": 0.5, "infrastructure_goodput": 0.9}
    counts = dict.fromkeys(("steps_lost", "attempts", "failed_attempts", "processes_replaced", "container_restarts"), 1)
    times = dict.fromkeys(("detected_s", "collective_out_s", "all_out_s", "caught_up_s", "load_s"), 0.1)

    def runs(name: str, values: list[float | None]) -> list[dict[str, Any]]:
        row = {"fault": "exception", "mechanism": name, **common, **counts, **times}
        return [{**row, "first_step_s": value} for value in values]

    table = recovery_table(runs("slow", [4.0, 6.0]) + runs("fast", [1.0, 1.5, 2.0]) + runs("lucky", [0.5, None]))
    by_name = {row["mechanism"]: row for row in table}
    assert by_name["fast"]["first_step_s"] == {"n": 3, "median": 1.5, "p95": 2.0, "p99": 2.0, "max": 2.0}
    assert by_name["slow"]["ratio"] == pytest.approx(5 / 1.5)
    assert by_name["lucky"]["recovered"] == 1 and by_name["fast"]["ratio"] == 1.0, "one that failed once sets no pace"
    assert median([1, 2, 3, 10]) == 2.5
