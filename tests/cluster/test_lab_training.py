"""The real launcher trains the reference job in the pod lab, and what befalls clusters befalls it.

One job takes half a minute; the campaign has the rest, and all twenty lost nodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridethrough.cluster.lab.compare import kubernetes_alone, measure
from ridethrough.cluster.lab.lab import Lab, needs
from ridethrough.cluster.lab.pod import Pod
from ridethrough.cluster.lab.training import Training, reference_spec, same_package
from ridethrough.cluster.render import render
from ridethrough.cluster.spec import JobSpec
from ridethrough.cluster.validate import validate_objects, validate_spec
from ridethrough.ledger.reading import read_events

QUICK_LEASE = "resources: {memory: 4Gi}\nlimits: {lease_s: 2}\n"


@contextmanager
def training(folder: Path, job: JobSpec, before: Callable[[Lab], Any] = lambda lab: None) -> Iterator[Training]:
    """The job in a lab, from its tenth step on; afterwards it is seen to its end."""
    why = needs()
    if why is not None:
        pytest.skip(why)
    with Lab(folder, env=same_package()) as lab:
        before(lab)
        lab.apply(render(job, token="0" * 64))
        told = Training(lab, job)
        lab.until(lambda: told.step() >= 10, 120, "no step 10")
        yield told
        assert lab.wait(240) == "complete"
        # A step that was done twice has the same loss: the state was restored, not made up.
        assert all(len(values) == 1 for values in told.losses().values())
        assert sorted(told.losses()) == list(range(1, told.step() + 1))
        assert [event["code"] for event in read_events(told.run) if event["kind"] == "job_end"][-1:] == [0]


def more_steps(told: Training, what: str, steps: int = 5) -> None:
    at = told.step()
    told.lab.until(lambda: told.step() >= at + steps, 90, what)


def commits(told: Training) -> set[str]:
    return {path.parent.name for path in (told.run / "checkpoints").glob("*/COMMIT")}


def lose(told: Training, rank: int) -> Pod:
    """The node of this rank falls silent; its pod runs on. A successor comes on another node."""
    return told.lab.lose_node(told.pod_of(rank).host, replaced_after_s=1.0)


def test_what_the_lab_runs_is_valid() -> None:
    job = reference_spec(100, 20)
    assert validate_spec(job).problems == []
    assert validate_objects(kubernetes_alone(job)).problems == []


def lose_nodes(folder: Path, count: int, seed: int) -> list[int]:
    """`count` nodes are lost in one job, of either rank; returns the steps done again for each. An old pod runs on, cut
    off, until the next loss; then its network heals, and it is told to end."""
    draw = random.Random(seed)
    redone: list[int] = []
    old: Pod | None = None
    with training(folder, reference_spec(40 * count + 30, 20, QUICK_LEASE)) as told:
        for number in range(count):
            waiting = f"after {number} of {count} losses no standby"
            told.lab.until(lambda: standby(told), 60, waiting)
            rank, before = draw.randrange(2), told.num_redone()
            lost = lose(told, rank)
            more_steps(told, f"loss {number} of rank {rank} was not recovered")
            redone.append(told.num_redone() - before)
            if old is not None:
                told.lab.heal(old)
                old.terminate()
            assert lost.exit_code is None, "the old pod runs beside its successor"
            old = lost
    return redone


def standby(told: Training) -> bool:
    """Whether a third pod has started its agent to the end: it has a keeper and a zygote."""
    ranks = [told.pod_of(rank) for rank in range(2)]
    others = [p for p in told.lab.pods if "trainer" in p.host and p.exit_code is None and p not in ranks]
    return any(told.lab.is_current(pod) and len(pod.cgroup.pids()) >= 3 for pod in others)


@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.campaign
def test_b37_two_lost_nodes(tmp_path: Path) -> None:
    redone = lose_nodes(tmp_path, 2, seed=1)
    assert all(steps <= 2 for steps in redone), redone  # 1, and one more where the replica was still on its way


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_b37_twenty_lost_nodes(tmp_path: Path) -> None:
    redone = lose_nodes(tmp_path, 20, seed=20)
    assert len(redone) == 20 and all(steps <= 2 for steps in redone), redone


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_b37_a_lost_writer_neither_commits_nor_joins(tmp_path: Path) -> None:
    """The node of rank 0, whose keeper leads every save, is cut off and hears SIGTERM while its successors train."""
    with training(tmp_path, reference_spec(120, 20, QUICK_LEASE)) as told:
        lost = lose(told, 0)
        more_steps(told, "the loss was not recovered")
        generation = max(event["generation"] for event in read_events(told.run) if event["kind"] == "plan")
        there = {name for name in commits(told) if f".g{generation}." not in name}
        lost.terminate()  # its last save
        told.lab.until(lambda: lost.exit_code is not None, 120, "the old pod does not end")
        assert lost.exit_code != 0, lost.log
        told.lab.heal(lost)
    assert {name for name in commits(told) if ".g1." in name} <= there, "the old generation committed later"
    plans = [event for event in read_events(told.run) if event["kind"] == "plan"]
    assert all(not member["node"].startswith(f"{lost.node}-") for plan in plans[1:] for member in plan["members"])


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_b35_b37_a_late_name_a_lost_coordinator_and_a_killed_pod(tmp_path: Path) -> None:
    late = lambda lab: lab.switch.dns.hide("t-coordinator-0-0.t", 2.0)  # noqa: E731
    with training(tmp_path, reference_spec(200, 20), before=late) as told:
        told.lab.kill("t-coordinator-0-0")
        more_steps(told, "training stopped with the coordinator")
        told.lab.wait_running("t-coordinator-0-0", 60)
        told.lab.until(lambda: "epoch 1" in told.lab.pod("t-coordinator-0-0").log, 60, "no second epoch")
        more_steps(told, "training stopped with the second coordinator", 60)  # by then it has heard from everybody
        told.lab.kill(told.pod_of(1).host)
        more_steps(told, "training did not go on after a pod was lost")
    assert {event["rung"] for event in read_events(told.run) if event["kind"] == "incident"} == {"replace_node"}


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_rank_that_takes_all_memory_is_killed_by_its_cgroup_and_replaced(tmp_path: Path) -> None:
    more = "resources: {memory: 2Gi}\nfaults: {count: 1, seed: 3, types: [oom], steps: 60}\n"
    more += "policy: {hang_floor_s: 60}\n"  # where pages come slowly, filling 2 GiB takes longer than a step may
    with training(tmp_path, reference_spec(60, 20, more)) as told:
        told.lab.until(lambda: told.step() >= 58, 120, "training stopped")
    (incident,) = [event for event in read_events(told.run) if event["kind"] == "incident"]
    assert incident["class"] in ("oom", "node_loss")  # on cgroup v2 the whole pod dies with it
    assert told.num_redone() <= 2


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_c45_a_drained_pod_saves_leaves_and_uses_up_nothing(tmp_path: Path) -> None:
    # More grace than it needs, since a busy machine is no fault of the launcher's.
    job = reference_spec(60, 20, "resources: {memory: 4Gi}\nlimits: {pod_grace_s: 90}\n")
    with training(tmp_path, job) as told:
        pod = told.lab.drain(told.pod_of(1).host)
        told.lab.until(lambda: pod.exit_code is not None, 60, "the drained pod did not end")
        assert pod.exit_code == 82, pod.log
    assert told.num_redone() == 0, "the last step was agreed on and saved"
    assert all(state.failures == 0 for state in told.lab.jobs.values())


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["kill", "lose_node"])
def test_kubernetes_alone_takes_ten_times_as_long(fault: str) -> None:
    why = needs()
    if why is not None:
        pytest.skip(why)
    ours, alone = (measure(mechanism, fault, 0) for mechanism in ("ridethrough", "kubernetes-pods"))
    assert ours.first_step_s is not None and ours.steps_lost is not None and ours.steps_lost <= 2, ours
    assert alone.first_step_s is None or alone.first_step_s > 10 * ours.first_step_s, (ours, alone)
