"""Several agents on one machine, as if each was a node: lost, replaced, cut off; their coordinator killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, free_port, wait_until

pytestmark = pytest.mark.ranks
COUNT = str(SCRIPTS / "count.py")
STEPS = 60


class Cluster:
    """A coordinator of its own and any number of agents with two ranks each."""

    def __init__(self, job: Any, nnodes: str = "2", steps: int = STEPS, *options: str) -> None:
        self.job, self.nnodes, self.steps = job, nnodes, steps
        self.options = ["--node-wait", "60", "--lease", "2", *options]
        self.endpoint = f"127.0.0.1:{free_port()}"

    def coordinator(self) -> Any:
        return self.job.start(
            *("coordinator", "--bind", self.endpoint, "--nnodes", self.nnodes, "--nproc-per-node", "2"),
            *("--token-file", str(self.job.token), "--runs", "runs", "--run-id", "a", *self.options),
            name="coordinator",
        )

    def agent(self, name: str, token: str | None = None) -> Any:
        return self.job.start(
            *("run", "--nnodes", self.nnodes, "--nproc-per-node", "2", "--rdzv-endpoint", self.endpoint, "--join"),
            *("--token-file", token or str(self.job.token), "--runs", "runs", "--run-id", "a", *self.options),
            *(COUNT, str(self.job.out), str(self.steps)),
            name=name,
        )


def pids(job: Any, generation: int) -> dict[int, int]:
    return {e["rank"]: e["pid"] for e in job.entered() if e["generation"] == generation}


def test_a_lost_node_is_replaced_by_the_standby(job: Any) -> None:
    cluster = Cluster(job)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    before = pids(job, 1)
    standby = cluster.agent("c")
    wait_until(lambda: job.last_step() >= 10, "no progress")
    agents[1].send_signal(signal.SIGKILL)
    assert job.wait(coordinator) == 0, job.text()
    assert [job.wait(agents[0]), job.wait(standby)] == [0, 0], job.text()
    after = pids(job, 2)
    kept = [rank for rank in before if before[rank] == after[rank]]
    assert len(kept) == 2 and kept[0] // 2 == kept[1] // 2, "the surviving node keeps its processes and ranks"
    assert job.results() == [expected(STEPS, 4)] * 4
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rung"]) == ("node_loss", "replace_node")


def test_who_comes_after_the_end_or_with_another_job_does_not_wait(job: Any) -> None:
    cluster = Cluster(job, "1", 90)
    coordinator = cluster.coordinator()
    agent = cluster.agent("a")
    wait_until(lambda: job.last_step() >= 1, lambda: f"no steps:\n{job.text()}")
    cluster.steps = 91
    stranger = cluster.agent("stranger")
    assert job.wait(stranger) == 2, job.text()
    assert "belongs to another config" in job.text("stranger")
    assert [job.wait(coordinator), job.wait(agent)] == [0, 0], job.text()
    cluster.steps = 90
    late = cluster.agent("late")
    assert job.wait(late) == 0, job.text()
    assert "the job was done before this machine came" in job.text("late")


def test_a_world_shrinks_if_it_may(job: Any) -> None:
    cluster = Cluster(job, "1:2", STEPS, "--node-wait", "1")
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    assert {e["world"] for e in job.entered()} == {4}
    agents[0].send_signal(signal.SIGKILL)
    assert job.wait(coordinator) == 0, job.text()
    assert job.wait(agents[1]) == 0, job.text()
    assert {e["world"] for e in job.entered() if e["generation"] == 2} == {2}


def test_without_enough_nodes_it_ends_with_a_code_to_retry(job: Any) -> None:
    cluster = Cluster(job, "2", STEPS, "--node-wait", "1")
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    agents[0].send_signal(signal.SIGKILL)
    assert job.wait(coordinator) == 80, job.text()
    assert job.wait(agents[1]) == 80, job.text()


@pytest.mark.campaign
def test_the_coordinator_killed_and_started_again_restarts_nothing(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    reached = job.last_step()
    again = cluster.coordinator()
    wait_until(lambda: job.last_step() >= reached + 10, lambda: f"training stopped:\n{job.text()}")
    assert job.wait(again) == 0, job.text()
    assert [job.wait(a) for a in agents] == [0, 0], job.text()
    assert {e["generation"] for e in job.entered()} == {1}
    assert job.results() == [expected(150, 4)] * 4


def test_sigterm_ends_a_coordinator_and_not_its_job(job: Any) -> None:
    """A rolling update of its pod, with the next one started before the old one has gone."""
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    coordinator.send_signal(signal.SIGTERM)
    assert job.wait(coordinator) == 128 + signal.SIGTERM
    assert job.wait(cluster.coordinator()) == 0, job.text()
    assert [job.wait(a) for a in agents] == [0, 0], job.text()
    assert {e["generation"] for e in job.entered()} == {1}
    assert [e["code"] for e in job.events("a", "job_end")] == [0]


@pytest.mark.campaign
def test_a_deposed_coordinator_leaves_the_job_to_the_next_one(job: Any) -> None:
    """Two at once: the older one finds the younger one's claim when it is to plan, and says nothing to the agents."""
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    (job.folder / "runs" / "a" / "epochs" / "1").write_text("another\n")
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    assert job.wait(coordinator) == 128 + signal.SIGTERM, job.text()
    assert job.wait(cluster.coordinator()) == 0, job.text()
    assert [job.wait(a) for a in agents] == [0, 0], job.text()
    assert job.results() == [expected(150, 4)] * 4


def test_a_job_that_is_taken_down_as_a_whole_saves_although_its_coordinator_goes_too(job: Any) -> None:
    cluster = Cluster(job, "2", 2000)
    processes = [cluster.coordinator(), cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [job.wait(p) for p in processes] == [82, 82, 82], job.text()
    assert len({e["step"] for e in job.events("a", "finish")}) == 1


@pytest.mark.campaign
def test_a_notice_without_a_coordinator_ends_the_node_within_its_grace(job: Any) -> None:
    cluster = Cluster(job, "2", 2000, "--stop-grace", "3")
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    assert [job.wait(a) for a in agents] == [82, 82], job.text()


def test_a_notice_reaches_the_coordinator_that_comes_next(job: Any) -> None:
    cluster = Cluster(job, "2", 5000, "--stop-grace", "40")
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    assert job.wait(cluster.coordinator()) == 82, job.text()
    assert [job.wait(a) for a in agents] == [82, 82], job.text()
    assert len({e["step"] for e in job.events("a", "finish")}) == 1


def test_a_restarted_coordinator_still_recovers_a_killed_rank(job: Any) -> None:
    cluster = Cluster(job, "2", 200)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    again = cluster.coordinator()
    wait_until(lambda: "epoch 1" in job.text("coordinator"), "no second epoch")
    reached = job.last_step()
    wait_until(lambda: job.last_step() >= reached + 30, lambda: f"training stopped:\n{job.text()}")
    os.kill(pids(job, 1)[3], signal.SIGKILL)
    assert job.wait(again) == 0, job.text()
    assert [job.wait(a) for a in agents] == [0, 0], job.text()
    assert job.results() == [expected(200, 4)] * 4
    (plan,) = [p for p in job.events("a", "plan") if p["generation"] == 2]
    assert plan["epoch"] == 1


def test_a_stranger_is_refused(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    other = job.folder / "other-token"
    other.write_text("x" * 64)
    wait_until(lambda: "listening" in job.text("coordinator"), "no coordinator")
    stranger = cluster.agent("stranger", token=str(other))
    assert job.wait(stranger) == 2, job.text()
    assert "token" in job.text("stranger")
    coordinator.send_signal(signal.SIGINT)
    assert job.wait(coordinator) == 130


@pytest.mark.campaign
def test_a_stopped_agent_that_comes_back_is_fenced(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    agents = {"a": cluster.agent("a"), "b": cluster.agent("b")}
    wait_until(lambda: job.last_step() >= 3, lambda: f"no steps:\n{job.text()}")
    old = [e["pid"] for e in job.entered() if e["rank"] >= 2]
    holder = next(n for n, p in agents.items() if any(_parent(pid) == p.pid for pid in old))
    os.killpg(agents[holder].pid, signal.SIGSTOP)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    standby = cluster.agent("c")
    wait_until(lambda: any(e["generation"] >= 2 for e in job.entered()), lambda: f"no second generation:\n{job.text()}")
    for pid in [agents[holder].pid, *old]:
        os.kill(pid, signal.SIGCONT)
    assert job.wait(coordinator) == 0, job.text()
    assert [job.wait(p) for p in [*agents.values(), standby]] == [0, 0, 0], job.text()
    assert job.results() == [expected(150, 4)] * 4
    newest = max(e["generation"] for e in job.entered())
    assert not {e["pid"] for e in job.entered() if e["generation"] == newest} & set(old)


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


@pytest.mark.campaign
def test_b20_an_agent_that_comes_and_goes_uses_up_no_restarts_and_gets_no_endless_tries(job: Any) -> None:
    """Lost nodes have a limit of their own: the second loss of a host cordons it (`cordon_after`)."""
    cluster = Cluster(job, "2", 5000, "--node-wait", "3", "--max-restarts", "3")
    coordinator = cluster.coordinator()
    first = cluster.agent("a")
    coming = cluster.agent("b0")
    for time_ in (1, 2, 3):
        reached = job.last_step()
        wait_until(lambda r=reached: job.last_step() > r + 2 or coordinator.poll() is not None, job.text)
        if coordinator.poll() is not None:
            break
        coming.send_signal(signal.SIGKILL)
        coming.wait()
        coming = cluster.agent(f"b{time_}")
    assert job.wait(coordinator) == 80, job.text()
    assert job.wait(first) == 80, job.text()
    losses = [i for i in job.events("a", "incident") if i["class"] == "node_loss"]
    assert 1 <= len(losses) <= 2 and len(losses) == len(job.events("a", "incident"))


@pytest.mark.campaign
def test_b37_a_deleted_pod_comes_back_under_another_name(job: Any) -> None:
    cluster = Cluster(job, "2", 120)
    coordinator = cluster.coordinator()
    stays, goes = cluster.agent("stays"), cluster.agent("goes")
    wait_until(lambda: job.last_step() >= 3, job.text)
    goes.send_signal(signal.SIGKILL)
    wait_until(lambda: "is lost" in job.text("coordinator"), job.text)
    reached = job.last_step()
    comes = cluster.agent("comes")
    assert job.wait(coordinator) == 0, job.text()
    assert [job.wait(stays), job.wait(comes)] == [0, 0], job.text()
    last = {e["rank"]: e for e in job.entered() if e["generation"] == 2}
    assert sorted(last) == [0, 1, 2, 3] and {e["start"] for e in last.values()} == {reached}
    assert job.results() == [expected(120, 4)] * 4


def test_a_node_that_gets_notice_leaves_and_the_standby_takes_its_place(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    agents = [cluster.agent("a"), cluster.agent("b")]
    wait_until(lambda: job.last_step() >= 3, job.text)
    standby = cluster.agent("c")
    wait_until(lambda: job.last_step() >= 15, job.text)
    agents[1].send_signal(signal.SIGTERM)
    assert job.wait(agents[1]) == 82, job.text()
    assert job.wait(coordinator) == 0, job.text()
    assert [job.wait(agents[0]), job.wait(standby)] == [0, 0], job.text()
    assert job.results() == [expected(150, 4)] * 4
    assert {i["class"] for i in job.events("a", "incident")} <= {"preemption"}


def test_b21_the_host_of_store_and_coordinator_lost_is_a_code_to_retry(job: Any) -> None:
    """Embedded in an agent, the coordinator's end is the job's: the other agent stops its ranks and says so."""
    endpoint = f"127.0.0.1:{free_port()}"
    policy = job.folder / "policy.json"
    policy.write_text('{"coordinator_wait_s": 2, "node_wait_s": 2}')
    args = ["run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "--token-file"]
    args += [str(job.token), "--runs", "runs", "--run-id", "a", "--policy", str(policy), COUNT, str(job.out), "5000"]
    host = job.start(*args, name="host")
    wait_until(lambda: list((job.folder / "runs").glob("a/events/*")), job.text)
    other = job.start(*args, name="other")
    wait_until(lambda: job.last_step() >= 3, job.text)
    host.send_signal(signal.SIGKILL)
    assert job.wait(other) == 80, job.text()
    assert "was not reachable" in job.text("other")


def ends(job: Any, count: int) -> None:
    import random

    draw = random.Random(58)
    script = job.folder / "end.py"
    script.write_text(
        "import os, sys, time, torch, torch.distributed as dist, ridethrough as rt\n"
        "def train(run):\n"
        "    for step in run.steps(0, 5): dist.all_reduce(torch.ones(1))\n"
        "rt.run(train)\n"
        "time.sleep(float(sys.argv[1 + int(os.environ['RANK'])]))\n"
    )
    for number in range(count):
        endpoint, name = f"127.0.0.1:{free_port()}", f"e{number}"
        args = ["run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "--token-file"]
        args += [
            str(job.token),
            "--runs",
            "runs",
            "--run-id",
            name,
            str(script),
            *(str(5 * draw.random()) for _ in "ab"),
        ]
        agents = [job.start(*args, name=f"{name}-a"), job.start(*args, name=f"{name}-b")]
        assert [job.wait(agent) for agent in agents] == [0, 0], job.text()
        for log in (f"{name}-a", f"{name}-b"):
            assert not any(word in job.text(log) for word in ("ERROR", "Traceback"))


def test_c58_a_job_that_is_done_ends_quietly_whoever_is_last(job: Any) -> None:
    ends(job, 1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_c58_twenty_quiet_ends(job: Any) -> None:
    ends(job, 20)
