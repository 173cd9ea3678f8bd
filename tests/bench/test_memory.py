"""`ridethrough bench memory` with small jobs: what it tells is measured, and is what the ledger says."""

from __future__ import annotations

from typing import Any

import pytest

from ridethrough.bench.memory import MemoryBench, costs, run_memory
from ridethrough.bench.memory_tables import memory_tables

SMALL: dict[str, Any] = {"state_mb": 12, "step_s": 0.05, "steps": 3, "reps": 1, "killed_reps": 1}


@pytest.mark.ranks
@pytest.mark.campaign
def test_steps_with_and_without_snapshots_and_replicas() -> None:
    result = run_memory(MemoryBench(["cost", "replicated"], **SMALL), print)
    cost, replicated = result["results"]
    assert cost["error"] is None and replicated["error"] is None
    assert cost["step_s"] > 0.05 and cost["replica_s"] is None and cost["stall_s"] > 0
    assert replicated["replica_s"] > 0
    assert len(list(memory_tables(result["results"]))) == 1


@pytest.mark.ranks
def test_a_kill_until_the_state_is_back() -> None:
    result = run_memory(MemoryBench(["killed"], killed_params=4e6, killed_ranks=2, **SMALL), print)
    (killed,) = result["results"]
    assert killed["error"] is None
    assert killed["tier"] == "memory" and killed["state_bytes"] == 48 * 2**20
    assert 0 < killed["out_s"] < killed["entered_s"] < killed["restored_s"] and killed["load_s"] > 0
    assert len(list(memory_tables(result["results"]))) == 1


def test_costs_are_medians_over_blocks_of_the_slowest_rank() -> None:
    def note(block: int, of: str, rank: int, step_s: float) -> dict[str, Any]:
        more = {"median_s": step_s, "stall_s": 0.001, "cpu_s": 0.5, "state_bytes": 7}
        return {"kind": "note", "block": block, "of": of, "rank": rank, "step_s": step_s, **more}

    events = [note(0, "warm", 0, 9.0)]
    for block, step_s in enumerate((1.0, 1.1, 1.0, 1.3, 2.0, 1.2), 1):
        of = "control" if block % 2 else "snapshots"
        events += [note(block, of, 0, step_s / 2), note(block, of, 1, step_s)]
    found = costs(events)
    assert (found["control_s"], found["step_s"]) == (1.0, 1.2)
    assert found["added"] == pytest.approx(0.2)
