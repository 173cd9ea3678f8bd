"""A pod is lost: how long until the next step? Ours, and the same job kept by Kubernetes alone, under the same rules.

    python -m ridethrough.cluster.lab.compare --reps 3 --json lab.json        (root; about two minutes a repetition)

"Kubernetes alone" is what most manifests do: an Indexed Job of torchrun pods with a fixed first pod as master, without
restarts of its own; a lost pod fails its peers, the Job controller makes new ones after its back-off, and training goes
on from the last checkpoint. Both train the reference job with the same steps, checkpoints, pods and volume.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ridethrough
from ridethrough.cluster import backends, naming, objects
from ridethrough.cluster.lab.lab import Lab
from ridethrough.cluster.lab.network import LabError
from ridethrough.cluster.objects import Object
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.render import render
from ridethrough.cluster.spec import JobSpec

MECHANISMS = ("ridethrough", "kubernetes-pods")
FAULTS = ("kill", "lose_node")
_STEP = re.compile(r"step (\d+)/")
_IN_FLIGHT_S = 0.5
"""A step that the lost pod had done its part of may still be told by its peer."""
_MASTER_PORT = 29500
_NODE_REPLACED_S = 80.0
"""A silent node: 50 s until it is noticed, 30 s of toleration (the profile's, not Kubernetes' 300)."""


@dataclass(frozen=True)
class Result:
    """Of one fault. `first_step_s` counts from the fault; `steps_lost` are done again."""

    mechanism: str
    fault: str
    rep: int
    first_step_s: float | None
    steps_lost: int | None
    pods_started: int
    error: str | None


def spec(steps: int, every: int) -> JobSpec:
    """The job that both run: two nodes of one rank on CPU, one standby node for ours."""
    words = ["-m", "ridethrough.train", "--preset", "tiny", "--steps", str(steps), "--checkpoint-every", str(every)]
    words += ["--log-every", "1", "--eval-every", "0", "--batch-size", "4"]
    return parse_spec(
        "name: t\nprofile: cpu\nnproc_per_node: 1\n"
        f"script: {json.dumps(words)}\n"
        'env: {OMP_NUM_THREADS: "1"}\n'
        "storage: {mount: /mnt/shared}\nresources: {memory: 4Gi}\n"
    )


def kubernetes_alone(job: JobSpec) -> list[Object]:
    """The objects of the same job without us."""
    alone = job.model_copy(update={"backend": "job", "standby": 0})
    service, _, trainer = backends.job(alone)
    container = trainer["spec"]["template"]["spec"]["containers"][0]
    master = f"{job.name}-{naming.TRAINER}-0.{naming.service(job)}"
    container["env"].append({"name": "RIDETHROUGH_AGENT", "value": "none"})  # the script, and nothing of ours beside it
    container["command"] = [
        *("python", "-m", "torch.distributed.run"),
        *("--nnodes", str(job.nodes), "--nproc-per-node", str(job.nproc_per_node)),
        *("--node-rank", "$(JOB_COMPLETION_INDEX)", "--max-restarts", "0"),
        *("--master-addr", master, "--master-port", str(_MASTER_PORT)),
        *job.script,
        *("--checkpoint-dir", f"{job.storage.mount}/checkpoints"),
    ]
    return [*objects.volumes(alone), objects.config_map(alone), objects.token_secret(alone, "0" * 64), service, trainer]


def same_package() -> dict[str, str]:
    """Environment in which pods run the package that this process runs."""
    return {"PYTHONPATH": str(Path(ridethrough.__file__).parents[1])}


def measure(mechanism: str, fault: str, rep: int, *, steps: int = 400, at_step: int = 35) -> Result:
    """One fault to the pod that is not rank 0, in a lab of its own. Never raises for what the mechanism does wrong."""
    job = spec(steps, every=20)
    ours = mechanism == "ridethrough"
    rendered = render(job, token="0" * 64) if ours else kubernetes_alone(job)
    with (
        tempfile.TemporaryDirectory(prefix="ridethrough-lab-", dir="/var/tmp") as folder,
        Lab(Path(folder), env=same_package()) as lab,
    ):
        lab.apply(rendered)
        try:
            lab.until(lambda: _last_step(lab) >= at_step, 90, f"no step {at_step}")
            victim = _other_trainer(lab)
            began, before = time.monotonic(), _last_step(lab)
            if fault == "kill":
                lab.kill(victim)
            else:
                lab.lose_node(victim, replaced_after_s=_NODE_REPLACED_S)
            time.sleep(_IN_FLIGHT_S)
            before = max(before, _last_step(lab))
            seen = _lines(lab)
            lab.until(lambda: _lines(lab) > seen, 240, "no new step")
            took, first = time.monotonic() - began, _newest_step(lab)
            return Result(mechanism, fault, rep, took, before + 1 - first, len(lab.pods), None)
        except LabError as error:
            return Result(mechanism, fault, rep, None, None, len(lab.pods), str(error).splitlines()[0])


def _other_trainer(lab: Lab) -> str:
    """A training pod that has not told a step: it is not rank 0, and not the standby, which has no worker yet."""
    pods = [pod for pod in lab.pods if pod.exit_code is None and naming.TRAINER in pod.host]
    silent = [pod for pod in pods if not _STEP.search(pod.log) and len(pod.cgroup.pids()) > 1]
    # The standby's zygote and keeper run too: who trains has used most CPU.
    return max(silent, key=lambda pod: _cpu_s(pod.cgroup.pids())).host


def _cpu_s(pids: list[int]) -> float:
    import psutil

    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def _told(lab: Lab) -> list[int]:
    return [int(step) for pod in list(lab.pods) for step in _STEP.findall(pod.log)]


def _lines(lab: Lab) -> int:
    return len(_told(lab))


def _last_step(lab: Lab) -> int:
    return max(_told(lab), default=0)


def _newest_step(lab: Lab) -> int:
    """The step that was told last, by the pod that told one last."""
    telling = [pod for pod in lab.pods if _STEP.search(pod.log)]
    newest = max(telling, key=lambda pod: (pod.folder / "log").stat().st_mtime_ns)
    return int(_STEP.findall(newest.log)[-1])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS))
    parser.add_argument("--faults", default="kill")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for rep in range(options.reps):
        for mechanism in options.mechanisms.split(","):
            for fault in options.faults.split(","):
                results.append(measure(mechanism, fault, rep))
                print(results[-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
