"""Two nodes on one machine, each with an agent and a keeper: a lost node's shares come from its neighbour's memory."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_job import free_port, wait_until
from launch_namespaces import Network, usable
from memory_runs import SAME, loads, notes, options

from ridethrough.checkpoint.agreement import Agreement
from ridethrough.checkpoint.held import NOTHING
from ridethrough.ledger.partition import read_events
from ridethrough.ledger.summary import ledger_summary, read_run

HERE = Path(__file__).parent
_why_not = usable()


def key(step: int) -> tuple[int, int, int]:
    return (0, 1, step)


def test_all_nodes_replicate_the_same_version_and_the_base_is_one_that_all_have_sent() -> None:
    one = Agreement(2, 1)
    assert one.report(0, [key(1)], NOTHING)["following"] == list(NOTHING)
    assert one.report(1, [key(1)], NOTHING) == {"base": [-1, -1, -1], "following": [0, 1, 1], "common": [0, 1, 1]}
    one.report(0, [key(2), key(1)], key(1))
    word = one.report(1, [key(3), key(2), key(1)], NOTHING)
    assert word == {"base": [-1, -1, -1], "following": [0, 1, 1], "common": [0, 1, 2]}
    word = one.report(1, [key(3), key(2), key(1)], key(1))
    assert word == {"base": [0, 1, 1], "following": [0, 1, 2], "common": [0, 1, 2]}
    assert one.report(0, [key(3)], key(1))["following"] == [0, 1, 3], "one that a node has given up can't be it"


def test_without_replicas_the_base_is_the_newest_that_all_have() -> None:
    one = Agreement(2, 0)
    one.report(0, [key(5), key(4)], NOTHING)
    assert one.report(1, [key(4)], NOTHING)["base"] == [0, 1, 4]


class Cluster:
    """A coordinator of its own and any number of agents with one rank each; on hosts of their own, if there is a
    network."""

    def __init__(self, job: Any, nnodes: str = "2", node_wait: str = "60", network: Network | None = None) -> None:
        self.job, self.network = job, network
        self.flags = ("--node-wait", node_wait, "--lease", "2")
        self.endpoint = f"{network.address(1)}:29500" if network else f"127.0.0.1:{free_port()}"
        common = ("--nnodes", nnodes, "--nproc-per-node", "1", "--token-file", str(job.token), "--runs", "runs")
        self.common = (*common, "--run-id", "r")

    def coordinator(self) -> Any:
        args = ("coordinator", "--bind", self.endpoint, *self.common, *self.flags)
        return self._start(1, "coordinator", *args)

    def agent(self, host: int, **more: Any) -> Any:
        script = (str(HERE / "epochs_job.py"), options(self.job, "r", loaders=False, **more))
        rest = ("--rdzv-endpoint", self.endpoint, "--join", *self.flags, *script)
        return self._start(host, f"host{host}", "run", *self.common, *rest)

    def _start(self, host: int, name: str, *args: str) -> Any:
        return self.job.start(*args, name=name, before=self.network.inside(host) if self.network else ())


@pytest.mark.ranks
@pytest.mark.root
@pytest.mark.skipif(bool(_why_not), reason=_why_not)
def test_a_lost_host_costs_no_more_steps_than_promised(launched: Any, control: Any) -> None:
    """Everything on the host is killed in one moment, agent, keeper and rank, and its link is down."""
    more = {"steps": 40, "step_s": 0.1, "every": None, "replicate_at": 5}
    with Network(4) as network:
        cluster = Cluster(launched, network=network)
        coordinator = cluster.coordinator()
        agents = {host: cluster.agent(host, **more) for host in (2, 3, 4)}
        run = launched.folder / "runs" / "r"
        wait_until(lambda: notes(launched, "r", 0).get(20), lambda: f"no step 20:\n{launched.text()}")
        pid = next(e["pid"] for e in read_events(run) if e["kind"] == "worker_spawn" and e["rank"] == 1)
        lost = next(host for host in agents if pid in network.pids(host))
        network.kill_all(lost)
        for folder in launched.temporary.glob(f"ridethrough-{agents.pop(lost).pid}-*"):
            shutil.rmtree(folder)  # it is gone with the machine
        assert launched.wait(coordinator) == 0, launched.text()
        assert [launched.wait(process) for process in agents.values()] == [0, 0], launched.text()
    assert [tier for _step, tier in loads(launched, "r")] == ["fresh", "peer"]
    (incident,) = ledger_summary(read_run(run))["incidents"]
    assert (incident["class"], incident["rung"]) == ("node_loss", "replace_node")
    promise = next(e for e in read_events(run) if e["kind"] == "promise")
    assert (promise["every"], promise["node_loss_steps"]) == (1, 2)  # a replica takes less than a step of 0.1 s
    assert incident["steps_lost"] <= promise["node_loss_steps"], incident
    assert "a lost node 2 steps" in launched.text()
    assert notes(launched, "r", 0)[5]["replicated"] is True
    assert any(e["replicated"] for e in read_events(run) if e["kind"] == "memory")
    for rank in range(2):
        mine = notes(launched, "r", rank)
        assert {k: mine[40][k] for k in SAME} == {k: control[rank][40][k] for k in SAME}


@pytest.mark.ranks
def test_a_killed_keeper_of_rank_0s_node_is_found_again_by_the_others(launched: Any, control: Any) -> None:
    """It decides for all nodes which version is the base: its successor listens where it did."""
    cluster = Cluster(launched)
    coordinator = cluster.coordinator()
    agents = [cluster.agent(host, steps=40, step_s=0.1, every=None) for host in (2, 3)]
    run = launched.folder / "runs" / "r"
    wait_until(lambda: notes(launched, "r", 0).get(8), lambda: f"no step 8:\n{launched.text()}")
    spawned = next(e for e in read_events(run) if e["kind"] == "worker_spawn" and e["rank"] == 0)
    agent = psutil.Process(spawned["pid"]).ppid()
    below = psutil.Process(agent).children(recursive=True)
    (keeper,) = [p for p in below if p.cmdline()[1:3] == ["-m", "ridethrough.checkpoint.keeper"]]
    keeper.kill()
    at = max(notes(launched, "r", 0))
    assert [launched.wait(process) for process in (coordinator, *agents)] == [0, 0, 0], launched.text()
    told = [e for e in read_events(run) if e["kind"] == "memory" and e["step"] > at + 2]
    assert told and told[-1]["replicated"], "the base goes on, on both nodes"
    assert not [e for e in read_events(run) if e["kind"] == "incident"]
    assert {k: notes(launched, "r", 0)[40][k] for k in SAME} == {k: control[0][40][k] for k in SAME}


@pytest.mark.ranks
def test_b38_a_world_that_shrinks_loads_the_shares_of_all_ranks_from_memory(launched: Any) -> None:
    """Case B38, without storage: one node is left, holds its own share and a replica of the other one's, and cuts the
    state anew. Loaders and random states follow the documented rule."""
    cluster = Cluster(launched, "1:2", "1")
    coordinator = cluster.coordinator()
    agents = [cluster.agent(host, steps=20, step_s=0.1, every=None) for host in (2, 3)]
    wait_until(lambda: notes(launched, "r", 0).get(8), lambda: f"no step 8:\n{launched.text()}")
    before = notes(launched, "r", 0)
    killed = next(process for process in agents if _parent_of_rank(launched.folder / "runs" / "r", 1) == process.pid)
    killed.send_signal(signal.SIGKILL)
    agents.remove(killed)
    assert launched.wait(coordinator) == 0, launched.text()
    assert launched.wait(agents[0]) == 0, launched.text()
    lines = (launched.folder / "r" / "loaded.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["world"], first["tier"], second["world"], second["tier"]) == (2, "fresh", 1, "peer")
    told = [json.loads(line) for line in (launched.folder / "r" / "rank0.jsonl").read_text().splitlines()]
    same = [note["sums"] for note in told if note["step"] == second["step"] and note["generation"] == 1]
    assert same == [second["sums"]] and second["step"] >= max(before) - 2
    assert max(notes(launched, "r", 0)) == 20


def _parent_of_rank(run: Path, rank: int) -> int:
    """The agent that started the process of a rank."""
    pid = next(e["pid"] for e in read_events(run) if e["kind"] == "worker_spawn" and e["rank"] == rank)
    while True:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        pid = int(stat[1])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"\0run\0" in command:
            return pid
