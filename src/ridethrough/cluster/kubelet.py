"""When Kubernetes starts something again: the rules of the kubelet and of the Job controller, as pure functions.

For the pod lab and for benchmarks that compare with "Kubernetes alone": the same waits, without a cluster.

- kubelet, restartPolicy OnFailure or Always: a container that ended is started again at once, then after 10, 20, 40 ...
  300 s; a container that ran for 600 s (twice the largest wait) starts from the beginning.
- Job controller, restartPolicy Never: a replacement pod is made 10 s after a failure, doubling to 600 s with each
  further failure; a pod that succeeds resets it.

These are the defaults; Kubernetes 1.32 and later can lower the kubelet's largest wait per node.
"""

from __future__ import annotations

from dataclasses import dataclass

KUBELET_FIRST_S = 10.0
KUBELET_LARGEST_S = 300.0
KUBELET_RESET_AFTER_S = 600.0
JOB_FIRST_S = 10.0
JOB_LARGEST_S = 600.0


@dataclass(frozen=True)
class ContainerBackoff:
    """The kubelet's memory of one container in one pod. `next_wait_s` is due at the next exit but the first."""

    restarts: int = 0
    next_wait_s: float = 0.0

    def ended(self, ran_s: float) -> tuple[float, ContainerBackoff]:
        """The container ended after running for `ran_s` seconds: (seconds until it is started again, new memory)."""
        wait = 0.0 if self.restarts == 0 or ran_s >= KUBELET_RESET_AFTER_S else self.next_wait_s
        following = KUBELET_FIRST_S if wait == 0.0 else min(wait * 2, KUBELET_LARGEST_S)
        return wait, ContainerBackoff(self.restarts + 1, following)


@dataclass(frozen=True)
class JobBackoff:
    """The Job controller's memory of one Job: failed pods since the last one that succeeded."""

    failures: int = 0

    def failed(self) -> tuple[float, JobBackoff]:
        """A pod failed: (seconds from its end until its replacement is made, new memory)."""
        wait = min(JOB_FIRST_S * 2**self.failures, JOB_LARGEST_S)
        return wait, JobBackoff(self.failures + 1)

    def succeeded(self) -> JobBackoff:
        """A pod succeeded: the next failure waits the least again."""
        return JobBackoff()


def container_waits(runs_s: list[float]) -> list[float]:
    """Waits before each restart of a container whose runs lasted `runs_s` seconds each."""
    memory, waits = ContainerBackoff(), []
    for ran_s in runs_s:
        wait, memory = memory.ended(ran_s)
        waits.append(wait)
    return waits
