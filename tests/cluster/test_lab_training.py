"""The real launcher trains the reference job in the pod lab, and what befalls clusters befalls it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridethrough.cluster.lab.compare import kubernetes_alone, same_package, spec
from ridethrough.cluster.lab.lab import Lab, needs
from ridethrough.cluster.render import render
from ridethrough.cluster.validate import validate_objects, validate_spec
from ridethrough.ledger.reading import read_events

STEPS = 100


def training(lab: Lab) -> Callable[[], int]:
    def last() -> int:
        return max((int(s) for pod in list(lab.pods) for s in re.findall(r"step (\d+)/", pod.log)), default=0)

    return last


def losses(lab: Lab) -> dict[int, set[str]]:
    out: dict[int, set[str]] = {}
    for pod in lab.pods:
        for step, loss in re.findall(r"step (\d+)/\d+ loss (\S+)", pod.log):
            out.setdefault(int(step), set()).add(loss)
    return out


def other_worker(lab: Lab) -> str:
    """The pod that trains and does not tell the steps: not rank 0."""
    silent = (pod for pod in lab.pods if "trainer" in pod.host and pod.exit_code is None and "step " not in pod.log)
    return max(silent, key=lambda pod: len(pod.cgroup.pids())).host


def events(lab: Lab) -> list[dict[str, Any]]:
    return list(read_events(lab.folder / "shared" / "runs" / "t"))


def test_what_the_lab_runs_is_valid() -> None:
    job = spec(STEPS, 20)
    assert validate_spec(job).problems == []
    assert validate_objects(kubernetes_alone(job)).problems == []


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_b37_lost_pods_and_a_lost_coordinator_do_not_stop_training(tmp_path: Path) -> None:
    why = needs()
    if why is not None:
        pytest.skip(why)
    job = spec(STEPS, 20)
    with Lab(tmp_path, env=same_package()) as lab:
        step = training(lab)
        lab.switch.dns.hide("t-coordinator-0-0.t", 2.0)  # B35: the name comes late
        lab.apply(render(job, token="0" * 64))
        lab.until(lambda: step() >= 25, 300, "no step 25")

        lab.kill("t-coordinator-0-0")
        at = step()
        lab.until(lambda: step() >= at + 10, 60, "training stopped with the coordinator")
        lab.wait_running("t-coordinator-0-0", 60)

        at = step()
        lab.kill(other_worker(lab))
        lab.until(lambda: step() >= at + 10, 90, "training did not go on after a pod was lost")

        assert lab.wait(240) == "complete"
        assert step() == STEPS
        # A step that was done twice has the same loss: the state was restored, not made up.
        assert all(len(values) == 1 for values in losses(lab).values())
        codes = [event["code"] for event in events(lab) if event["kind"] == "job_end"]
        assert codes[-1:] == [0]


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_c45_a_drained_pod_saves_leaves_and_uses_up_nothing(tmp_path: Path) -> None:
    why = needs()
    if why is not None:
        pytest.skip(why)
    job = spec(60, 20)
    # More time than it needs, since a busy machine is no fault of the launcher's.
    job = job.model_copy(update={"limits": job.limits.model_copy(update={"pod_grace_s": 90})})
    with Lab(tmp_path, env=same_package()) as lab:
        step = training(lab)
        lab.apply(render(job, token="0" * 64))
        lab.until(lambda: step() >= 25, 300, "no step 25")
        pod = lab.drain(other_worker(lab))
        lab.until(lambda: pod.exit_code is not None, 60, "the drained pod did not end")
        assert pod.exit_code == 82, pod.log
        assert lab.wait(240) == "complete"
        assert step() == 60
        assert all(state.failures == 0 for state in lab.jobs.values())
        assert all(len(values) == 1 for values in losses(lab).values())
