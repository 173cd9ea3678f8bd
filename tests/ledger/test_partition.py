"""The partition of time on cases worked out by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from ledger_cases import S, around, event, fault, job_start, plan, step, worked_case, write

from ridethrough.ledger.partition import NUM_COLUMNS, LedgerError, Partition, check, partition, read_events
from ridethrough.ledger.schema import STATES, problems


def seconds(part: Partition) -> dict[str, float]:
    return {state: ns / S for state, ns in part.states_ns.items() if ns}


def test_the_worked_case() -> None:
    events = [*around(), *worked_case()]
    assert [p for e in events for p in problems(e)] == []
    part = partition(events)
    assert seconds(part) == {
        "step": 10.0,
        "lost_step": 3.0,
        "partial_step": 0.5,
        "detect": 0.5,
        "teardown": 1.0,
        "rebuild": 1.0,
        "init": 1.5,
        "restore": 1.0,
    }
    assert part.wall_ns == 18_500_000_000
    assert f"{part.training_goodput:.2%}" == "54.05%"
    assert part.infrastructure_goodput == pytest.approx(16 / 18.5)
    assert list(part.states_ns) == list(STATES)


def test_order_of_the_files_does_not_matter() -> None:
    assert partition([*worked_case(), *around()]).segments == partition([*around(), *worked_case()]).segments


def test_a_peer_waits_from_the_fault_on_but_a_step_it_finished_counts() -> None:
    peer = [e for e in worked_case(1) if e["kind"] != "fault_injected"]
    peer[8] = step(6, 7.75, 7, rank=1)  # slower: done after the fault, before the declaration
    part = partition([*around(2), *worked_case(), *peer])
    lane = [(s.state, s.t0 / S, s.t1 / S) for s in part.segments[1] if s.generation == 0]
    assert lane[6:9] == [("lost_step", 6.0, 7.75), ("detect", 7.75, 8.0), ("teardown", 8.0, 9.0)]


def test_without_injector_the_guilty_ranks_last_sign_is_the_fault() -> None:
    silent = [e for e in worked_case() if e["kind"] != "fault_injected"]
    reports = [e for e in around() if e["kind"] != "fault"]
    part = partition([*reports, fault(8, fault_ns=None), *silent])
    assert seconds(part)["detect"] == 1.0  # since the end of step 7
    assert "partial_step" not in seconds(part)
    known = partition([*reports, fault(8, fault_ns=7_400_000_000), *silent])
    assert seconds(known)["partial_step"] == 0.4


def test_the_root_is_charged_although_a_peer_reported_first() -> None:
    peer = [e for e in worked_case(1) if e["kind"] != "fault_injected"]
    reports = [e for e in around(2) if e["kind"] != "fault"]
    cut = fault(7.9, rank=1, **{"class": "collective"})
    died = fault(8.1, rank=0, **{"class": "sigkill", "detected_by": "waitpid"})
    part = partition([*reports, cut, died, *worked_case(), *peer])
    assert seconds(part)["detect"] == pytest.approx(2 * 0.4)  # 7.5 until the first report
    assert seconds(part)["partial_step"] == 1.0


def test_parts_and_phases_are_carved_out() -> None:
    events = [
        job_start(0, 1),
        event("enter", 1, generation=0, rank=0),
        event("loop", 2, generation=0, rank=0, step=0),
        step(2, 4, 1, parts=(("data_wait", 2, 2.5), ("snapshot_stall", 3.75, 4))),
        event("phase", 4, generation=0, rank=0, phase="eval", edge="begin", step=1),
        event("phase", 5, generation=0, rank=0, phase="eval", edge="end", step=1),
        step(5.25, 6, 2),
        event("phase", 6, generation=0, rank=0, phase="save", edge="begin", step=2),
        event("phase", 7, generation=0, rank=0, phase="save", edge="end", step=2),
        event("finish", 7.5, generation=0, rank=0, step=2),
        event("exit", 8, generation=0, rank=0, code=0),
        event("job_end", 9, code=0, reason="done"),
    ]
    part = partition(events)
    assert seconds(part) == {
        "launch": 1.0,
        "init": 1.0,
        "step": 2.0,
        "data_wait": 0.5,
        "snapshot_stall": 0.25,
        "eval": 1.0,
        "unattributed": 0.25,
        "finish": 3.0,  # with the last save
    }
    assert part.warning is not None and "unattributed" in part.warning


def test_a_replaced_worker_goes_on_in_its_slot_and_a_zombie_does_not_count() -> None:
    zombie = [step(7.5, 9.25, 8), step(9.25, 11, 9)]  # the old process on a lost node, after all were out
    part = partition([*around(), *worked_case(), *zombie])
    assert part.states_ns == partition([*around(), *worked_case()]).states_ns


def test_clock_order_between_processes_never_makes_an_overlap() -> None:
    events = [*around(), *worked_case()]
    early = [e for e in events if e["kind"] not in ("all_out", "fault")]
    late = [fault(10.00001), event("all_out", 10.00002, generation=0)]  # after the next `enter`
    part = partition([*early, *late])
    assert sum(part.states_ns.values()) == part.wall_ns
    assert part.training_goodput == partition(events).training_goodput


def test_shrink_leaves_the_slot_degraded_until_it_is_planned_again() -> None:
    events = [
        job_start(0, 2),
        plan(1, 0, [0, 1]),
        *(event("enter", 2, generation=0, rank=r) for r in (0, 1)),
        *(event("loop", 2, generation=0, rank=r, step=0) for r in (0, 1)),
        *(step(2, 3, 1, rank=r) for r in (0, 1)),
        fault(3.5, rank=1, fault_ns=3 * S),
        event("all_out", 4, generation=0),
        plan(5, 1, [0]),
        event("enter", 6, generation=1, rank=0),
        event("loop", 6, generation=1, rank=0, step=1),
        step(6, 7, 2, generation=1),
        plan(8, 2, [0, 1]),
        *(event("enter", 9, generation=2, rank=r) for r in (0, 1)),
        *(event("loop", 9, generation=2, rank=r, step=2) for r in (0, 1)),
        *(step(9, 10, 3, generation=2, rank=r) for r in (0, 1)),
        event("job_end", 10, code=0, reason="done"),
    ]
    part = partition(events)
    lane = [(s.state, s.t0 / S, s.t1 / S) for s in part.segments[1]]
    assert lane == [
        ("launch", 0, 2),
        ("step", 2, 3),
        ("detect", 3, 3.5),
        ("teardown", 3.5, 4),
        ("rebuild", 4, 5),
        ("degraded", 5, 8),
        ("rebuild", 8, 9),
        ("step", 9, 10),
    ]
    assert seconds(part)["partial_step"] == 1.0  # rank 0, cut by the planned change


def test_a_rank_that_never_comes_back_is_in_rebuild_until_the_end() -> None:
    peer = [e for e in worked_case(1) if e.get("generation") == 0 and e["kind"] != "fault_injected"]
    part = partition([*around(2), *worked_case(), *peer])
    assert part.segments[1][-1].state == "rebuild"
    assert part.segments[1][-1].t1 == part.end_ns


def test_a_run_killed_in_the_middle_ends_at_its_last_event_and_live_at_now() -> None:
    events = [e for e in [*around(), *worked_case()] if e["t_ns"] <= 13.6 * S]
    part = partition(events)
    assert part.wall_ns == 13.5 * S and seconds(part)["step"] == 5.0
    live = partition(events, end_ns=14 * S)
    assert seconds(live)["partial_step"] == 1.0 and live.wall_ns == 14 * S
    done = partition([*around(), *worked_case()], end_ns=99 * S)  # has a job_end: not stretched
    assert done.wall_ns == 18.5 * S


def test_two_jobs_of_one_run_are_one_wall_with_the_gap_queued() -> None:
    second = [
        job_start(20, 1),
        event("enter", 21, generation=0, rank=0),
        event("resumed", 21, generation=0, rank=0, step=9, tier="disk", source="x"),
        event("loop", 22, generation=0, rank=0, step=9),
        step(22, 23, 10),
        event("job_end", 23, code=0, reason="done"),
    ]
    part = partition([*around(), *worked_case(), *second])
    assert seconds(part)["queued"] == 1.5
    assert seconds(part)["lost_step"] == 4.0  # 5, 6, 7 of the first generation and 10 of the second
    assert seconds(part)["step"] == 10.0
    assert part.wall_ns == 23 * S


def test_a_generation_that_fell_over_before_its_first_step_rolls_nothing_back() -> None:
    extra = [
        event("resumed", 12.2, generation=1, rank=0, step=0, tier="disk", source="older"),
        fault(12.3, generation=1, fault_ns=12_250_000_000),
        event("all_out", 12.4, generation=1),
        event("enter", 12.5, generation=2, rank=0),
        event("resumed", 13, generation=2, rank=0, step=6, tier="memory", source="x"),
        event("loop", 13.5, generation=2, rank=0, step=6),
        step(13.5, 14.5, 7, generation=2),
        event("job_end", 14.5, code=0, reason="done"),
    ]
    first = [e for e in [*around(), *worked_case()] if e["t_ns"] <= 12 * S]
    assert seconds(partition([*first, *extra]))["lost_step"] == 1.0


def test_a_load_event_is_a_restore_and_a_resume() -> None:
    plain = [*around(), *worked_case()]
    kept = [e for e in plain if e["kind"] != "resumed" and e.get("phase") != "load"]
    load = event("load", 12, generation=1, rank=0, step=4, tier="disk", source="x", seconds=1.0)
    assert partition([*kept, load]).states_ns == partition(plain).states_ns


def test_the_death_of_a_spare_ends_nothing() -> None:
    plain = [*around(), *worked_case()]
    spare = {**fault(14, generation=1, fault_ns=None), "rank": None}
    assert partition([*plain, spare]).states_ns == partition(plain).states_ns


def test_a_dead_worker_without_a_declared_fault_is_unattributed() -> None:
    events = [
        job_start(0, 1),
        event("enter", 0, generation=0, rank=0),
        event("loop", 0, generation=0, rank=0, step=0),
        step(0, 1, 1),
        event("worker_exit", 1.5, worker="w0", pid=1, node=0, rank=0, exit_code=None, signal=9),
        event("job_end", 2, code=137, reason="killed"),
    ]
    assert seconds(partition(events)) == {"step": 1.0, "partial_step": 0.5, "unattributed": 0.5}


def test_the_picture_of_a_long_lane_has_in_each_column_the_state_with_most_of_it() -> None:
    """4,000 steps of 1 to 2 s with waits of 0 to 1 s, one long pause; the columns are added up here."""
    rng, t, steps = random.Random(3), 0.0, []
    for number in range(1, 4001):
        took, wait = rng.uniform(1, 2), rng.uniform(0, 1)
        steps.append(step(t, t + took, number, parts=(("data_wait", t, t + wait),)))
        t += took + (80 if number == 2000 else 0)
    end = job_start(0, 1), event("loop", 0, generation=0, rank=0, step=0), event("job_end", t, code=0, reason="done")
    part = partition([*end, *steps])
    (lane,), (drawn,) = part.segments, part.pictures
    shown = {t1: state for state, _, t1 in drawn.pieces(part.start_ns)}
    edges = [part.start_ns + int(k * (part.wall_ns / NUM_COLUMNS)) for k in range(NUM_COLUMNS)] + [part.end_ns]
    segments = iter([*lane])
    segment = next(segments)
    for a, b in pairwise(edges):
        shares = Counter[str]()
        while True:
            shares[segment.state] += max(0, min(b, segment.t1) - max(a, segment.t0))
            if segment.t1 > b or (following := next(segments, None)) is None:
                break
            segment = following
        state = next(state for t1, state in shown.items() if t1 >= b)
        assert shares[state] == max(shares.values())
    assert {"step", "data_wait", "unattributed"} == set(shown.values())


def test_no_events_and_a_broken_partition_are_errors() -> None:
    with pytest.raises(LedgerError, match="no events"):
        partition([])
    with pytest.raises(LedgerError, match="no slot"):
        partition([event("notice", 1)])
    part = partition([*around(), *worked_case()])
    part.states_ns["step"] += 1
    with pytest.raises(LedgerError, match=r"\+1 ns"):
        check(part)
    with pytest.raises(LedgerError, match="slot 0: covered until"):
        check(replace(part, segments=[part.segments[0][:-1]]))


def test_files_of_several_processes_with_torn_tails(tmp_path: Path) -> None:
    write(tmp_path, "h-coordinator-1", around(), tail='{"t_ns": 5, "ki')
    write(tmp_path, "h-worker-2", worked_case()[:9], tail='{"t_ns"')
    write(tmp_path, "h-worker-3", worked_case()[9:])
    events = read_events(tmp_path)
    assert [e["t_ns"] for e in events] == sorted(e["t_ns"] for e in events)
    assert f"{partition(events).training_goodput:.2%}" == "54.05%"


def test_a_cut_line_before_a_header_is_a_reused_process_id_and_elsewhere_damage(tmp_path: Path) -> None:
    header = '{"t_ns": 3, "kind": "header", "boot_id": "b", "mono_ns": 3, "wall_ns": 3}\n'
    write(tmp_path, "h-worker-2", [], tail='{"t_ns": 1, "kin\n' + header)
    assert [e["kind"] for e in read_events(tmp_path)] == ["header", "header"]
    write(tmp_path, "h-worker-2", [], tail='{"t_ns": 1, "kin\n{"t_ns": 4, "kind": "enter"}\n')
    with pytest.raises(LedgerError, match=r"h-worker-2\.jsonl:2"):
        read_events(tmp_path)


def test_another_boot_is_brought_onto_the_first_clock(tmp_path: Path) -> None:
    shifted = []
    for e in worked_case():
        e = {k: v - 3 * S if k in ("t_ns", "t0_ns", "t1_ns") else v for k, v in e.items()}
        shifted.append(e)
    write(tmp_path, "h-coordinator-1", around(), boot="a", wall_ns=100 * S)
    write(tmp_path, "g-worker-1", shifted, boot="b", wall_ns=103 * S)
    part = partition([e for e in read_events(tmp_path) if e["kind"] != "header"])
    assert f"{part.training_goodput:.2%}" == "54.05%"
