"""Several hosts, as network namespaces: a lost one, a cut link, a standby, many kills. Needs root."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, wait_until
from launch_namespaces import Network, usable

_why_not = usable()
pytestmark = [pytest.mark.ranks, pytest.mark.root, pytest.mark.skipif(bool(_why_not), reason=_why_not)]
COUNT = str(SCRIPTS / "count.py")
PORT = 29500


class Hosts:
    """The coordinator on host 1, one agent with two ranks on each of the others."""

    def __init__(self, job: Any, network: Network, steps: int, *options: str) -> None:
        self.job, self.network, self.steps = job, network, steps
        shared = [
            "--token-file",
            str(job.token),
            "--runs",
            "runs",
            "--run-id",
            "a",
            "--lease",
            "2",
            "--node-wait",
            "60",
        ]
        self.options = ["--nnodes", "2", "--nproc-per-node", "2", *shared, *options]
        self.endpoint = f"{network.address(1)}:{PORT}"
        self.coordinator = self._start(1, "coordinator", "coordinator", "--bind", self.endpoint, *self.options)
        self.agents: dict[int, Any] = {}

    def agent(self, host: int) -> Any:
        join = ["--rdzv-endpoint", self.endpoint, "--join"]
        name = f"host{host}-{len(self.job.processes)}"
        self.agents[host] = self._start(
            host, name, "run", *self.options, *join, COUNT, str(self.job.out), str(self.steps)
        )
        return self.agents[host]

    def _start(self, host: int, name: str, *args: str) -> Any:
        return self.job.start(*args, name=name, before=self.network.inside(host))

    def started(self, step: int = 3) -> None:
        wait_until(lambda: self.job.last_step() >= step, self.job.text)

    def generation(self) -> int:
        return max((e["generation"] for e in self.job.entered()), default=0)

    def finished(self, world: int = 4) -> None:
        assert self.job.wait(self.coordinator) == 0, self.job.text()
        assert self.job.results() == [expected(self.steps, world)] * world


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(4) as network:
        yield network


@pytest.mark.campaign
def test_a_host_lost_with_all_on_it_is_replaced_by_the_standby(job: Any, network: Network) -> None:
    hosts = Hosts(job, network, 120)
    for host in (2, 3):
        hosts.agent(host)
    hosts.started()
    hosts.agent(4)
    wait_until(lambda: job.last_step() >= 15, job.text)
    network.kill_all(3)
    for folder in job.temporary.glob(f"ridethrough-{hosts.agents[3].pid}-*"):
        shutil.rmtree(folder)  # it is gone with the machine
    hosts.finished()
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rung"], incident["detected_by"]) == ("node_loss", "replace_node", "lease")
    assert [job.wait(hosts.agents[host]) for host in (2, 4)] == [0, 0]


@pytest.mark.campaign
def test_a_link_cut_for_a_moment_restarts_nothing_for_long_costs_the_place(job: Any, network: Network) -> None:
    hosts = Hosts(job, network, 300)
    for host in (2, 3):
        hosts.agent(host)
    hosts.started()
    network.cut(3)
    time.sleep(0.7)
    network.heal(3)
    reached = job.last_step()
    wait_until(lambda: job.last_step() > reached + 10, job.text)
    assert hosts.generation() == 1, job.text()
    network.cut(3)
    wait_until(lambda: "is lost" in job.text("coordinator"), job.text)
    network.heal(3)
    hosts.finished()
    assert [job.wait(agent) for agent in hosts.agents.values()] == [0, 0], job.text()


def kills(job: Any, network: Network, count: int, seed: int) -> None:
    """One rank after the other, at moments that the seed draws: in a step, in a recovery, two at once."""
    draw = random.Random(seed)
    hosts = Hosts(job, network, 100 + 60 * count, "--max-restarts", "200")
    for host in (2, 3):
        hosts.agent(host)
    hosts.started()
    for kill in range(count):
        generation, reached = hosts.generation(), job.last_step()
        wait_until(lambda r=reached: job.last_step() > r + 3, job.text)
        newest = {e["rank"]: e["pid"] for e in job.entered()}
        time.sleep(draw.random() * 0.3)
        victims = draw.sample(sorted(newest), 2 if kill % 3 == 1 else 1)
        for rank in victims:
            _kill(newest[rank])
        if kill % 3 == 2:  # another one while the others recover
            time.sleep(draw.random() * 0.4)
            _kill(newest[next(rank for rank in sorted(newest) if rank not in victims)])
        wait_until(lambda g=generation: hosts.generation() > g, job.text)
    hosts.finished()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.campaign
def test_kills_at_seeded_moments(job: Any, network: Network) -> None:
    kills(job, network, 3, seed=42)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_twenty_kills_in_a_row(job: Any, network: Network) -> None:
    kills(job, network, 20, seed=43)
