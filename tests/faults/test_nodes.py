"""The faults that take a whole node, in jobs of two nodes with a standby."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, free_port, wait_until
from launch_namespaces import Network, usable

from ridethrough.generation.socket_folder import sweep_folders

pytestmark = pytest.mark.ranks
STEPS = 40
_no_hosts = usable()


class Nodes:
    """A coordinator of its own, two agents with a rank each, a standby. `before(n)` comes before the command of node n;
    the coordinator is node 1."""

    def __init__(self, job: Any, fault: str, endpoint: str, before: Any = lambda node: ()) -> None:
        self.job = job
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--token-file", str(job.token), "--runs", "runs"]
        options += ["--run-id", "a", "--lease", "2", "--node-wait", "60"]
        script = [str(SCRIPTS / "count.py"), str(job.out), str(STEPS)]
        join = ["run", *options, "--fault-at", fault, "--rdzv-endpoint", endpoint, "--join", *script]
        coordinator = ["coordinator", "--bind", endpoint, *options]
        self.coordinator = job.start(*coordinator, name="coordinator", before=before(1))
        self.agents = [job.start(*join, name=f"node{node}", before=before(node)) for node in (2, 3)]
        wait_until(lambda: job.last_step() >= 1, job.text)
        self.agents.append(job.start(*join, name="node4", before=before(4)))

    def ended(self) -> None:
        """Checks the job's end, which two of the agents have seen."""
        assert self.job.wait(self.coordinator) == 0, self.job.text()
        assert self.job.results() == [expected(STEPS, 2)] * 2
        (incident,) = self.job.events("a", "incident")
        told = (incident["class"], incident["detected_by"], incident["rung"], incident["rank"])
        assert told == ("node_loss", "lease", "replace_node", 1)
        wait_until(lambda: [agent.poll() for agent in self.agents].count(0) == 2, self.job.text)


def test_node_loss_kills_the_nodes_whole_tree_and_the_standby_takes_its_place(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(job, "node_loss:1:10", f"127.0.0.1:{free_port()}")
    wait_until(lambda: job.events("a", "fault_injected"), job.text)
    nodes.ended()
    assert sorted(agent.poll() for agent in nodes.agents) == [-9, 0, 0]
    monkeypatch.setattr(tempfile, "tempdir", str(job.temporary))
    sweep_folders()  # as the next launch does on a node that comes back: nothing of this one was left to do it


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.skipif(bool(_no_hosts), reason=_no_hosts)
def test_a_node_whose_network_is_cut_is_replaced(job: Any) -> None:
    with Network(4) as network:
        nodes = Nodes(job, "cut_network:1:10", f"{network.address(1)}:29500", network.inside)
        wait_until(lambda: job.events("a", "fault_injected"), job.text)
        nodes.ended()
        (cut_off,) = [agent for agent in nodes.agents if agent.poll() is None]  # it still waits for its coordinator
        cut_off.kill()
        job.check_nothing_left()
