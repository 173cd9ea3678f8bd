"""The reference job in the lab: its spec, and what its pods tell about steps, losses and ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ridethrough
from ridethrough.cluster import naming
from ridethrough.cluster.lab.lab import Lab
from ridethrough.cluster.lab.network import LabError
from ridethrough.cluster.lab.pod import Pod
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.spec import JobSpec
from ridethrough.ledger.reading import read_events

_STEP = re.compile(r"step (\d+)/\d+ loss (\S+)")


def reference_spec(steps: int, every: int, more: str = "") -> JobSpec:
    """Two nodes of one rank on CPU and one standby node; a checkpoint `every` so many steps, a snapshot each step."""
    words = ["-m", "ridethrough.train", "--preset", "tiny", "--steps", str(steps), "--checkpoint-every", str(every)]
    words += ["--log-every", "1", "--eval-every", "0", "--batch-size", "4"]
    return parse_spec(
        "name: t\nprofile: cpu\nnproc_per_node: 1\n"
        f"script: {json.dumps(words)}\n"
        'env: {OMP_NUM_THREADS: "1"}\n'
        "storage: {mount: /mnt/shared}\n"
        f"{more or 'resources: {memory: 4Gi}'}\n"
    )


def same_package() -> dict[str, str]:
    """Environment in which pods run the package that this process runs."""
    return {"PYTHONPATH": str(Path(ridethrough.__file__).parents[1])}


class Training:
    """Reads the pods' logs, and the run's folder where there is one."""

    def __init__(self, lab: Lab, job: JobSpec) -> None:
        self.lab = lab
        self.run = lab.folder / "shared" / "runs" / job.name

    def told(self) -> list[tuple[int, str]]:
        """(step, loss) as often as it was told; pods in the order of their starts."""
        return [(int(step), loss) for pod in list(self.lab.pods) for step, loss in _STEP.findall(pod.log)]

    def step(self) -> int:
        """The newest step, 0 before the first."""
        return max((step for step, _ in self.told()), default=0)

    def num_redone(self) -> int:
        """Steps that were done again, all faults together."""
        told = [step for step, _ in self.told()]
        return len(told) - len(set(told))

    def losses(self) -> dict[int, set[str]]:
        out: dict[int, set[str]] = {}
        for step, loss in self.told():
            out.setdefault(step, set()).add(loss)
        return out

    def newest_of(self) -> int:
        """The step that was told last, by the pod that told one last."""
        telling = [pod for pod in self.lab.pods if _STEP.search(pod.log)]
        newest = max(telling, key=lambda pod: (pod.folder / "log").stat().st_mtime_ns)
        return int(_STEP.findall(newest.log)[-1][0])

    def pod_of(self, rank: int) -> Pod:
        """The pod that has this rank (each has one): by the newest plan, or by its index where there is no plan. Raises
        LabError while it is not running."""
        plans = [event for event in read_events(self.run) if event["kind"] == "plan"] if self.run.exists() else []
        for pod in self.lab.pods:
            if pod.exit_code is not None or naming.TRAINER not in pod.host:
                continue
            if not plans:
                found = pod.index == rank
            else:
                plan = max(plans, key=lambda event: (event["epoch"], event["generation"]))
                member = next(member for member in plan["members"] if member["rank"] == rank)
                found = member["node"].rpartition("-")[0] == pod.node
            if found:
                return pod
        raise LabError(f"no pod with rank {rank} is running")
