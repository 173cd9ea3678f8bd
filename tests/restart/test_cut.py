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

from ridethrough.restart.groups import Groups
from ridethrough.restart.sockets import connections, event_loops, gloo_loops, stop_receiving, tcp_sockets

WORLD = 4
GROUP_TIMEOUT = datetime.timedelta(seconds=4)


def all_ranks(work: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    return threads


def make_groups() -> list[Any]:
    store = dist.HashStore()
    groups: list[Any] = [None] * WORLD

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, WORLD, GROUP_TIMEOUT)

    for thread in all_ranks(make):
        thread.join()
    return groups


def cut_once(plan: random.Random) -> list[str]:
    """Four ranks, threads of this process, are busy; one stops and all are cut, in any order. What they then raised."""
    before = event_loops()
    groups = make_groups()
    loops = gloo_loops(before)
    raised: list[str] = []
    fault = threading.Event()
    guilty, last, numel = plan.randrange(WORLD), plan.randrange(1, 20), plan.choice((1_000, 100_000))
    gathers = plan.random() < 0.5

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


def num_connections() -> int:
    return sum(not found.listening for found in tcp_sockets().values())


def test_connections_are_held_until_the_next_groups_have_worked() -> None:
    before = num_connections()
    ours = Groups(store_port=0, abort_limit_s=3.0)
    ours.opening(True)
    groups = make_groups()
    ours.opening(False)
    ours.cut_connections()
    for group in groups:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            group.allreduce([torch.ones(1)]).wait()
    ours.cut_connections()  # the monitor cuts again and again until the main thread is out
    held = num_connections() - before
    assert held == WORLD * (WORLD - 1)  # both ends of each are in this process; gloo has closed its own
    ours.close()
    assert num_connections() - before == held
    Groups.bury()
    assert num_connections() == before
