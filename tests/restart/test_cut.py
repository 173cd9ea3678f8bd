"""Ranks that are cut out of gloo's collectives all come out: none stays in a send whose connection is gone."""

from __future__ import annotations

import datetime
import itertools
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridethrough.restart.sockets import connections, event_loops, gloo_loops, stop_receiving

WORLD = 4
GROUP_TIMEOUT = datetime.timedelta(seconds=4)


def all_ranks(work: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    return threads


def cut_once(plan: random.Random) -> list[str]:
    """Four ranks, threads of this process, are busy; one stops and all are cut, in any order. What they then raised."""
    store, before = dist.HashStore(), event_loops()
    groups: list[Any] = [None] * WORLD
    raised: list[str] = []
    fault = threading.Event()
    guilty, last, numel = plan.randrange(WORLD), plan.randrange(1, 20), plan.choice((1_000, 100_000))
    gathers = plan.random() < 0.5

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, WORLD, GROUP_TIMEOUT)

    def train(rank: int) -> None:
        part, whole = torch.ones(numel), torch.ones(WORLD * numel)
        for step in itertools.count():
            if (rank, step) == (guilty, last):
                fault.set()
                return
            try:
                if gathers:
                    groups[rank]._allgather_base(whole, part).wait()
                else:
                    groups[rank].allreduce([part]).wait()
            except RuntimeError as error:
                raised.append(str(error))
                return

    for thread in all_ranks(make):
        thread.join()
    loops = gloo_loops(before)
    threads = all_ranks(train)
    assert fault.wait(30)
    held = {}
    for loop in plan.sample(loops, WORLD):
        held.update(stop_receiving(connections([loop])))
    for thread in threads:
        thread.join()
    for sock in held.values():
        sock.close()
    return raised


@pytest.mark.parametrize("cuts", [40, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_every_rank_comes_out_of_its_collective(cuts: int) -> None:
    plan = random.Random(7)
    raised = [cut_once(plan) for _ in range(cuts)]
    assert {len(errors) for errors in raised} == {WORLD - 1}
    stayed = [error for errors in raised for error in errors if "Timed out" in error]
    assert stayed == []
