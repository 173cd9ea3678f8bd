"""A pod is lost: how long until the next step? Ours, and the same job kept by Kubernetes alone, under the same rules.

    python -m ridethrough.cluster.lab.compare --reps 3 --json lab.json        (root; about two minutes a repetition)

"Kubernetes alone" is what most manifests do: an Indexed Job of torchrun pods with a fixed first pod as master, without
restarts of its own; a lost pod fails its peers, the Job controller makes new ones after its back-off, and training goes
on from the last checkpoint. Both train the reference job with the same steps, checkpoints, pods and volume.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ridethrough.cluster import backends, naming, objects
from ridethrough.cluster.lab.lab import Lab
from ridethrough.cluster.lab.network import LabError
from ridethrough.cluster.lab.training import Training, reference_spec, same_package
from ridethrough.cluster.objects import Object
from ridethrough.cluster.render import render
from ridethrough.cluster.spec import JobSpec

MECHANISMS = ("ridethrough", "kubernetes-pods")
FAULTS = ("kill", "lose_node")
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


def measure(mechanism: str, fault: str, rep: int, *, steps: int = 400, at_step: int = 35) -> Result:
    """One fault to the pod that is not rank 0, in a lab of its own. Never raises for what the mechanism does wrong."""
    job = reference_spec(steps, every=20)
    ours = mechanism == "ridethrough"
    rendered = render(job, token="0" * 64) if ours else kubernetes_alone(job)
    with (
        tempfile.TemporaryDirectory(prefix="ridethrough-lab-", dir="/var/tmp") as folder,
        Lab(Path(folder), env=same_package()) as lab,
    ):
        training = Training(lab, job)
        lab.apply(rendered)
        try:
            lab.until(lambda: training.step() >= at_step, 90, f"no step {at_step}")
            victim = training.pod_of(1).host
            began, before = time.monotonic(), training.step()
            if fault == "kill":
                lab.kill(victim)
            else:
                lab.lose_node(victim, replaced_after_s=_NODE_REPLACED_S)
            time.sleep(_IN_FLIGHT_S)
            before = max(before, training.step())
            seen = len(training.told())
            lab.until(lambda: len(training.told()) > seen, 240, "no new step")
            took, first = time.monotonic() - began, training.newest_of()
            return Result(mechanism, fault, rep, took, before + 1 - first, len(lab.pods), None)
        except LabError as error:
            return Result(mechanism, fault, rep, None, None, len(lab.pods), str(error).splitlines()[0])


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
