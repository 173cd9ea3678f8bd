"""`ridethrough bench gpu`: on a GPU what it measures must be so at any size; without one its jobs still run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridethrough.bench.gpu import GpuBench, run_gpu
from ridethrough.bench.gpu_tables import tables

pytestmark = pytest.mark.ranks
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL: dict[str, Any] = {"dim": 512, "layers": 6, "restart_dim": 512, "restart_layers": 4, "killed_sequences": 4}
TINY: dict[str, Any] = {"dim": 64, "layers": 1, "restart_dim": 64, "restart_layers": 1, "killed_sequences": 1}
TINY |= {"length": 16, "step_s": 0.05, "memory_step_s": 0.05, "steps": 20, "every": (10,), "reps": 1, "copies_gib": 0.1}


def rows(part: str, **asked: Any) -> list[dict[str, Any]]:
    result = run_gpu(GpuBench([part], **asked), print)
    assert [row["error"] for row in result["results"] if row["error"]] == []
    assert list(tables(result["results"]))
    found: list[dict[str, Any]] = result["results"]
    return found


def gpu(test: Any) -> Any:
    for mark in on_gpu:
        test = mark(test)
    return test


@gpu
def test_a_process_that_enters_again_and_again_holds_no_more_of_anything() -> None:
    found = rows("restarts", cycles=9, **SMALL)
    assert len({row["pid"] for row in found}) == 1
    third, last = found[2], found[-1]
    for name in ("threads", "fds", "allocated_bytes"):
        assert last[name] <= third[name], name
    assert last["reserved_bytes"] <= 1.5 * found[1]["reserved_bytes"]


@gpu
def test_who_has_a_broken_context_or_left_something_on_the_gpu_is_replaced() -> None:
    replaced = {row["fault"]: row["replaced"] for row in rows("gate", **SMALL)}
    again = {"exception": False, "out_of_memory": False}
    assert replaced == {
        **dict.fromkeys(("device_assert", "illegal_access", "leak", "cuda_graph", "busy_gpu"), True),
        **again,
    }


@gpu
def test_a_killed_rank_goes_on_from_memory_to_the_same_bits() -> None:
    *faults, end = rows("killed", **SMALL)
    assert end["final_equal"] and len(faults) == 4
    assert all(row["tier"] == "memory" and row["steps_lost"] <= 1 for row in faults)


@gpu
@pytest.mark.parametrize("part", ["memory", "saves"])
def test_what_was_saved_while_training_went_on_is_what_is_loaded(part: str) -> None:
    *blocks, load = rows(part, reps=1, step_s=0.05, memory_step_s=0.05, steps=40, every=(10,), **SMALL)
    assert load["wrong_tensors"] == 0 and blocks


@pytest.mark.campaign
@pytest.mark.parametrize("part", ["copies", "restarts", "killed", "memory", "saves"])
def test_the_jobs_run_without_a_gpu(part: str) -> None:
    assert rows(part, cycles=3, **TINY)
