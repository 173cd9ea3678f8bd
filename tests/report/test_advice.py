"""Advice: the formulas against figures worked out by hand, and on a run of which everything is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import around, event, step, worked_case, write

from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.summary import RunLedger, read_run
from ridethrough.report.advice import advise, daly_s, spares_needed, young_s
from ridethrough.report.stragglers import rank_times, stragglers
from ridethrough.report.timeouts import time_limits


def save(t_s: float, number: int, what: str, **fields: object) -> dict:
    return event("save", t_s, generation=0, rank=0, step=number, event=what, **fields)


@pytest.fixture
def ledger(tmp_path: Path) -> RunLedger:
    run = create_run(tmp_path, run_id="a", config={}, command=[], schedule_hash=None)
    write(run.path, "h-coordinator-1", around())
    saves = [save(4, 4, "staged"), save(4.5, 4, "committed", bytes=10**9, seconds=0.5, path="p")]
    saves += [save(14, 6, "staged"), save(14.5, 6, "committed", bytes=10**9, seconds=0.5, path="p")]
    write(run.path, "h-worker-2", sorted([*worked_case(), *saves], key=lambda e: e["t_ns"]))
    return read_run(run.path)


def test_young_and_daly() -> None:
    assert young_s(5, 3600) == pytest.approx(189.7367, abs=1e-3)
    # Daly's own terms: sqrt(2dM) = 189.74, sqrt(d/2M)/3 = 0.008784, d/18M = 0.0000772
    assert daly_s(5, 3600) == pytest.approx(189.7367 * (1 + 0.0087841 + 0.00007716) - 5, abs=1e-3)
    assert daly_s(8000, 3600) == 3600


def test_spares() -> None:
    assert [spares_needed(x) for x in (0, 0.005, 0.1, 1.0)] == [0, 0, 1, 4]  # P(N > 4 | 1) = 0.0037, P(N > 3) = 0.019
    assert spares_needed(2000) > 2000


def test_the_interval_is_bounded_by_the_write(ledger: RunLedger) -> None:
    by_name = {item.name: item for item in advise(ledger).items}
    assert by_name["mean time between failures"].value == 18.5
    interval = by_name["checkpoint interval"]
    assert interval.inputs["bounded_by"] == "one step"  # steps of 1 s, writes of 0.5 s, nothing stalls
    assert interval.value == 1
    assert by_name["write time / interval"].value == pytest.approx(0.05)
    assert not by_name["write time / interval"].warning
    tier = by_name["memory tier: replicate every"]
    assert tier.value == 1 and "2 steps" in tier.note
    slow = {item.name: item for item in advise(ledger, replica_gbit_s=2.0).items}
    assert slow["memory tier: replicate every"].value == 4  # 8 Gbit over 2 Gbit/s


def test_what_a_recovery_costs(ledger: RunLedger) -> None:
    report = advise(ledger, gpu_hour_price=36.0)
    cost = report.costs[-1]
    assert (cost.class_, cost.count) == ("all", 1)
    assert cost.gpu_hours == pytest.approx(8.0 / 3600)  # from 7.5 until step 7 was done again at 15.5
    assert cost.money == pytest.approx(0.08)


def test_time_limits_come_from_the_longest(ledger: RunLedger) -> None:
    rows = {row.phase: row for row in time_limits([ledger, ledger])}
    assert rows["load"].longest_s == 1.0 and rows["load"].count == 2
    assert rows["load"].proposed_s == 30.0
    assert rows["init"].longest_s == 2.5
    assert rows["step"].proposed_s == 4.0


def test_a_slow_loader_is_found(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="b", config={}, command=[], schedule_hash=None)
    for rank in range(8):
        wait = 0.001 * (1 + rank % 3) if rank != 5 else 0.3
        steps = [step(n - 1, n, n, rank=rank, parts=(("data_wait", n - 1, n - 1 + wait),)) for n in range(1, 6)]
        write(run.path, f"h-worker-{rank + 2}", [event("enter", 0, generation=0, rank=rank), *steps])
    found = stragglers(rank_times(read_run(run.path).steps))
    assert [(s.rank, s.measure) for s in found] == [(5, "data_wait")]
    assert "rank 5: data_wait 300.0 ms a step" in found[0].line()


def test_two_ranks_have_no_outlier(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="b", config={}, command=[], schedule_hash=None)
    write(run.path, "h-worker-2", [step(0, 1, 1)])
    write(run.path, "h-worker-3", [step(0, 9, 1, rank=1)])
    assert stragglers(rank_times(read_run(run.path).steps)) == []
