"""Several agents on one machine, as if each was a node: lost, replaced, cut off; their coordinator killed."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, free_port, wait_until

pytestmark = pytest.mark.ranks
COUNT = str(SCRIPTS / "count.py")
STEPS = 60


class Cluster:
    """A coordinator of its own and any number of agents with two ranks each. `running`: whose end is still to be
    checked."""

    def __init__(self, job: Any, nnodes: str = "2", steps: int = STEPS, *options: str) -> None:
        self.job, self.nnodes, self.steps = job, nnodes, steps
        self.options = ["--node-wait", "60", "--lease", "2", *options]
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.running: list[Any] = []

    def coordinator(self) -> Any:
        return self._start(
            *("coordinator", "--bind", self.endpoint, "--nnodes", self.nnodes, "--nproc-per-node", "2"),
            *("--token-file", str(self.job.token), "--runs", "runs", "--run-id", "a", *self.options),
            name="coordinator",
        )

    def agent(self, name: str, token: str | None = None, env: dict[str, str] | None = None) -> Any:
        return self._start(
            *("run", "--nnodes", self.nnodes, "--nproc-per-node", "2", "--rdzv-endpoint", self.endpoint, "--join"),
            *("--token-file", token or str(self.job.token), "--runs", "runs", "--run-id", "a", *self.options),
            *(COUNT, str(self.job.out), str(self.steps)),
            name=name,
            env=env,
        )

    def train(self) -> tuple[Any, Any, Any]:
        """Coordinator and two agents, which have done three steps."""
        processes = self.coordinator(), self.agent("a"), self.agent("b")
        self.reach(3)
        return processes

    def reach(self, step: int) -> None:
        wait_until(lambda: self.job.last_step() >= step, lambda: f"step {step} is not reached:\n{self.job.text()}")

    def go_on(self, num_steps: int) -> None:
        self.reach(self.job.last_step() + num_steps)

    def kill(self, process: Any) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.running.remove(process)

    def ends(self, process: Any, code: int) -> None:
        self.running.remove(process)
        assert self.job.wait(process) == code, self.job.text()

    def all_end(self, code: int = 0) -> None:
        while self.running:
            self.ends(self.running[0], code)

    def check_results(self) -> None:
        """As if nothing had happened, on all four ranks."""
        assert self.job.results() == [expected(self.steps, 4)] * 4

    def _start(self, *args: str, **how: Any) -> Any:
        self.running.append(self.job.start(*args, **how))
        return self.running[-1]


def nodes(job: Any) -> set[str]:
    """Whose agents are up: each has started a process."""
    return {event["node"] for event in job.events("a", "worker_spawn")}


def pids(job: Any, generation: int) -> dict[int, int]:
    return {e["rank"]: e["pid"] for e in job.entered() if e["generation"] == generation}


def generations(job: Any) -> set[int]:
    return {e["generation"] for e in job.entered()}


def test_a_lost_node_is_replaced_by_the_standby(job: Any) -> None:
    cluster = Cluster(job)
    _, _, second = cluster.train()
    before = pids(job, 1)
    cluster.agent("c")
    cluster.reach(10)
    cluster.kill(second)
    cluster.all_end()
    after = pids(job, 2)
    kept = [rank for rank in before if before[rank] == after[rank]]
    assert len(kept) == 2 and kept[0] // 2 == kept[1] // 2, "the surviving node keeps its processes and ranks"
    cluster.check_results()
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rung"]) == ("node_loss", "replace_node")


@pytest.mark.campaign
def test_a_node_that_fails_its_check_gives_its_place_to_the_standby(job: Any) -> None:
    """A rank of the other node dies; before it enters again, the sick one finds out that it is sick."""
    (job.folder / "policy.json").write_text('{"evict_on": ["user"], "rebuild_limit_s": 60}')
    cluster = Cluster(job, "2", 5000, "--policy", str(job.folder / "policy.json"))
    coordinator, sick = cluster.coordinator(), job.folder / "sick"
    cluster.agent("a", env={"SICK": str(sick)})
    wait_until(lambda: len(nodes(job)) == 1, job.text)
    (sick_node,) = nodes(job)
    cluster.agent("b"), cluster.agent("c")
    wait_until(lambda: len(nodes(job)) == 3, job.text)
    cluster.reach(20)
    sick.touch()
    first = job.events("a", "plan")[0]["members"]
    victim = next(member["rank"] for member in first if member["node"] != sick_node)
    os.kill(pids(job, 1)[victim], signal.SIGKILL)
    wait_until(lambda: len(pids(job, 2)) == 4, lambda: f"no second generation:\n{job.text()}")
    cluster.go_on(3)
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rank"], incident["rung"]) == ("sigkill", victim, "replace_node")
    assert f"{sick_node}: check user failed" in incident["why"]
    assert {member["node"] for member in first} > {sick_node}
    assert sick_node not in {member["node"] for member in job.events("a", "plan")[1]["members"]}
    coordinator.send_signal(signal.SIGINT)
    cluster.all_end(130)


@pytest.mark.campaign
def test_who_comes_after_the_end_or_with_another_job_does_not_wait(job: Any) -> None:
    cluster = Cluster(job, "1", 90)
    cluster.coordinator()
    cluster.agent("a")
    cluster.reach(1)
    cluster.steps = 91
    cluster.ends(cluster.agent("stranger"), 2)
    assert "belongs to another config" in job.text("stranger")
    cluster.all_end()
    cluster.steps = 90
    cluster.ends(cluster.agent("late"), 0)
    assert "the job was done before this machine came" in job.text("late")


def test_a_world_shrinks_if_it_may(job: Any) -> None:
    cluster = Cluster(job, "1:2", STEPS, "--node-wait", "1")
    _, first, _ = cluster.train()
    assert {e["world"] for e in job.entered()} == {4}
    cluster.kill(first)
    cluster.all_end()
    assert {e["world"] for e in job.entered() if e["generation"] == 2} == {2}


def test_without_enough_nodes_it_ends_with_a_code_to_retry(job: Any) -> None:
    cluster = Cluster(job, "2", STEPS, "--node-wait", "1")
    _, first, _ = cluster.train()
    cluster.kill(first)
    cluster.all_end(80)


@pytest.mark.campaign
def test_the_coordinator_killed_and_started_again_restarts_nothing(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator, _, _ = cluster.train()
    cluster.kill(coordinator)
    cluster.coordinator()
    cluster.go_on(10)
    cluster.all_end()
    assert generations(job) == {1}
    cluster.check_results()


@pytest.mark.campaign
def test_a_node_and_the_coordinator_lost_and_a_standby_that_comes_first(job: Any) -> None:
    """The standby waits until the one that is left has told of the plan, and the plan that follows has its incident."""
    cluster = Cluster(job, "2", 5000)
    coordinator, first, second = cluster.train()
    before = pids(job, 1)
    cluster.agent("c")
    wait_until(lambda: len({e["node"] for e in job.events("a", "worker_spawn")}) == 3, job.text, every_s=0.5)
    cluster.go_on(10)
    cluster.kill(coordinator)
    cluster.kill(second)
    first.send_signal(signal.SIGSTOP)
    cluster.coordinator()
    wait_until(lambda: "epoch 1" in job.text("coordinator"), job.text)
    time.sleep(2.5)  # an agent tries again after two seconds at most
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: len(pids(job, 2)) == 4, job.text)
    cluster.go_on(10)
    for process in cluster.running:
        process.send_signal(signal.SIGTERM)
    cluster.all_end(82)
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rung"], incident["generation"]) == ("node_loss", "replace_node", 1)
    assert len(set(before.values()) & set(pids(job, 2).values())) == 2, "the survivors' processes stay"


def test_processes_that_a_restarted_coordinator_does_not_know_are_not_left_beside_its_own(job: Any) -> None:
    """A script without `rt.run` has no plan from which they could be known."""
    script = job.folder / "plain.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "(here / f'began-{os.getpid()}').touch()\n"
        "while not (here / 'go').exists(): time.sleep(0.02)\n"
    )
    cluster = Cluster(job, "1")
    coordinator = cluster.coordinator()
    args = ["run", "--nproc-per-node", "2", "--rdzv-endpoint", cluster.endpoint, "--join", "--token-file"]
    args += [str(job.token), "--runs", "runs", "--run-id", "a", str(script), str(job.out)]
    cluster.running.append(job.start(*args))
    began = lambda: {int(p.name.split("-")[1]) for p in job.out.glob("began-*")}  # noqa: E731
    wait_until(lambda: len(began()) == 2, job.text)
    old = began()
    cluster.kill(coordinator)
    cluster.coordinator()
    wait_until(lambda: len(began()) == 4, job.text)
    assert not old & set(job.alive())
    (job.out / "go").touch()
    cluster.all_end()


@pytest.mark.campaign
def test_sigterm_ends_a_coordinator_and_not_its_job(job: Any) -> None:
    """A rolling update of its pod, with the next one started before the old one has gone."""
    cluster = Cluster(job, "2", 150)
    coordinator, _, _ = cluster.train()
    coordinator.send_signal(signal.SIGTERM)
    cluster.ends(coordinator, 128 + signal.SIGTERM)
    cluster.coordinator()
    cluster.all_end()
    assert generations(job) == {1}
    assert [e["code"] for e in job.events("a", "job_end")] == [0]


@pytest.mark.campaign
def test_a_deposed_coordinator_leaves_the_job_to_the_next_one(job: Any) -> None:
    """Two at once: the older one finds the younger one's claim when it is to plan, and says nothing to the agents."""
    cluster = Cluster(job, "2", 150)
    coordinator, _, _ = cluster.train()
    (job.folder / "runs" / "a" / "epochs" / "1").write_text("another\n")
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    cluster.ends(coordinator, 128 + signal.SIGTERM)
    cluster.coordinator()
    cluster.all_end()
    cluster.check_results()


def test_a_job_that_is_taken_down_as_a_whole_saves_although_its_coordinator_goes_too(job: Any) -> None:
    cluster = Cluster(job, "2", 2000)
    for process in cluster.train():
        process.send_signal(signal.SIGTERM)
    cluster.all_end(82)
    assert len({e["step"] for e in job.events("a", "finish")}) == 1


@pytest.mark.campaign
def test_a_notice_without_a_coordinator_ends_the_node_within_its_grace(job: Any) -> None:
    cluster = Cluster(job, "2", 2000, "--stop-grace", "3")
    coordinator, *agents = cluster.train()
    cluster.kill(coordinator)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    cluster.all_end(82)


@pytest.mark.campaign
def test_a_notice_reaches_the_coordinator_that_comes_next(job: Any) -> None:
    cluster = Cluster(job, "2", 5000, "--stop-grace", "40")
    coordinator, *agents = cluster.train()
    cluster.kill(coordinator)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    cluster.coordinator()
    cluster.all_end(82)
    assert len({e["step"] for e in job.events("a", "finish")}) == 1


def test_a_restarted_coordinator_still_recovers_a_killed_rank(job: Any) -> None:
    cluster = Cluster(job, "2", 200)
    coordinator, _, _ = cluster.train()
    cluster.kill(coordinator)
    cluster.coordinator()
    wait_until(lambda: "epoch 1" in job.text("coordinator"), "no second epoch")
    cluster.go_on(30)
    os.kill(pids(job, 1)[3], signal.SIGKILL)
    cluster.all_end()
    cluster.check_results()
    (plan,) = [p for p in job.events("a", "plan") if p["generation"] == 2]
    assert plan["epoch"] == 1


def test_a_stranger_is_refused(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    coordinator = cluster.coordinator()
    other = job.folder / "other-token"
    other.write_text("x" * 64)
    wait_until(lambda: "listening" in job.text("coordinator"), "no coordinator")
    cluster.ends(cluster.agent("stranger", token=str(other)), 2)
    assert "token" in job.text("stranger")
    cluster.options += ["--nproc-per-node", "1"]
    cluster.ends(cluster.agent("smaller"), 2)
    assert "--nproc-per-node is 1" in job.text("smaller")
    coordinator.send_signal(signal.SIGINT)
    cluster.all_end(130)


@pytest.mark.campaign
def test_a_stopped_agent_that_comes_back_is_fenced(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    _, *agents = cluster.train()
    old = [e["pid"] for e in job.entered() if e["rank"] >= 2]
    (holder,) = [agent.pid for agent in agents if any(_parent(pid) == agent.pid for pid in old)]
    os.killpg(holder, signal.SIGSTOP)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    cluster.agent("c")
    wait_until(lambda: max(generations(job)) >= 2, lambda: f"no second generation:\n{job.text()}")
    for pid in [holder, *old]:
        os.kill(pid, signal.SIGCONT)
    cluster.all_end()
    cluster.check_results()
    assert not set(pids(job, max(generations(job))).values()) & set(old)


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


@pytest.mark.campaign
def test_b20_an_agent_that_comes_and_goes_uses_up_no_restarts_and_gets_no_endless_tries(job: Any) -> None:
    """Lost nodes have a limit of their own: the second loss of a host cordons it (`cordon_after`)."""
    cluster = Cluster(job, "2", 5000, "--node-wait", "3", "--max-restarts", "3")
    coordinator = cluster.coordinator()
    cluster.agent("a")
    coming = cluster.agent("b0")
    for time_ in (1, 2, 3):
        reached = job.last_step()
        wait_until(lambda r=reached: job.last_step() > r + 2 or coordinator.poll() is not None, job.text)
        if coordinator.poll() is not None:
            break
        cluster.kill(coming)
        coming = cluster.agent(f"b{time_}")
    cluster.running.remove(coming)  # cordoned, or still waiting
    cluster.all_end(80)
    losses = [i for i in job.events("a", "incident") if i["class"] == "node_loss"]
    assert 1 <= len(losses) <= 2 and len(losses) == len(job.events("a", "incident"))


@pytest.mark.campaign
def test_b37_a_deleted_pod_comes_back_under_another_name(job: Any) -> None:
    cluster = Cluster(job, "2", 120)
    _, _, goes = cluster.train()
    cluster.kill(goes)
    wait_until(lambda: "is lost" in job.text("coordinator"), job.text)
    reached = job.last_step()
    cluster.agent("comes")
    cluster.all_end()
    last = {e["rank"]: e for e in job.entered() if e["generation"] == 2}
    assert sorted(last) == [0, 1, 2, 3] and {e["start"] for e in last.values()} == {reached}
    cluster.check_results()


def test_a_node_that_gets_notice_leaves_and_the_standby_takes_its_place(job: Any) -> None:
    cluster = Cluster(job, "2", 150)
    _, _, leaves = cluster.train()
    cluster.agent("c")
    cluster.reach(15)
    leaves.send_signal(signal.SIGTERM)
    cluster.ends(leaves, 82)
    cluster.all_end()
    cluster.check_results()
    assert {i["class"] for i in job.events("a", "incident")} <= {"preemption"}
    assert "is lost" not in job.text("coordinator")


@pytest.mark.parametrize(
    ("preemptions", "max_restarts"),
    [(2, 1), pytest.param(5, 2, marks=[pytest.mark.campaign, pytest.mark.timeout(900)])],
)
def test_c45_preemptions_use_no_restarts_up(job: Any, preemptions: int, max_restarts: int) -> None:
    """More of them than restarts are allowed; then so many crashes, and the next one ends the job."""
    cluster = Cluster(job, "2", 100_000, "--nproc-per-node", "1", "--max-restarts", str(max_restarts))
    coordinator = cluster.coordinator()
    agents = [cluster.agent("n0"), cluster.agent("n1")]
    for number in range(preemptions):
        goes_on(job)
        agents.append(cluster.agent(f"n{number + 2}"))
        agents[-2].send_signal(signal.SIGTERM)
        assert job.wait(agents[-2]) == 82, job.text()
    for _ in range(max_restarts + 1):
        goes_on(job)
        os.kill(job.entered()[-1]["pid"], signal.SIGKILL)
    assert job.wait(coordinator) == 80, job.text()
    classes = [incident["class"] for incident in job.events("a", "incident")]
    assert classes == ["preemption"] * preemptions + ["sigkill"] * (max_restarts + 1)
    assert [job.wait(agent) for agent in (agents[0], agents[-1])] == [80, 80], job.text()


def goes_on(job: Any) -> None:
    reached = job.last_step()
    wait_until(lambda: job.last_step() > reached + 2, job.text)


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
        args += [str(job.token), "--runs", "runs", "--run-id", name, str(script)]
        args += [str(5 * draw.random()) for _ in "ab"]
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
