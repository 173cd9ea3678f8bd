"""What the memory tier promises, once it has been measured: how often a snapshot is taken, and how many steps a lost
node costs.

A dead process costs at most `every` steps, one if every step is held. A lost node costs at most k + 1 of them, with
k = ceil(replication time / time between two snapshots) (rule 6 of the design).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

WARM_STEPS = 3  # the first snapshots make arenas and are compared whole
MEASURED_STEPS = 10
AFFORDABLE = 0.02  # of training time, for snapshots whose interval is chosen by their cost


@dataclass
class Promise:
    """Seconds of a step without its snapshot, of the training thread's wait for one, and of one replication (None: no
    replicas)."""

    every: int
    step_s: float
    snapshot_s: float
    replica_s: float | None

    @property
    def node_loss_steps(self) -> int | None:
        if self.replica_s is None:
            return None
        k = max(1, math.ceil(self.replica_s / (self.every * self.step_s + self.snapshot_s)))
        return self.every * (k + 1)

    def text(self) -> str:
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        said = (
            f"memory tier: a snapshot {often} holds training up {self.snapshot_s * 1e3:.1f} ms of "
            f"{self.every * self.step_s * 1e3:.1f} ms; a dead process costs at most {_steps(self.every)}"
        )
        if self.node_loss_steps is None:
            return said + ", a lost node is not survived from memory"
        return said + f", a lost node {_steps(self.node_loss_steps)} (a replica takes {self.replica_s:.2f} s)"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def affordable_every(step_s: float, snapshot_s: float) -> int:
    """The smallest interval at which snapshots cost at most AFFORDABLE of the training time."""
    return max(1, math.ceil(snapshot_s / (AFFORDABLE * max(step_s, 1e-9))))


class Measuring:
    """Times of a rank's first snapshots. Training thread only."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []

    def snapshot_begins(self, now_s: float, stall_s: float) -> tuple[float, float] | None:
        """Before each snapshot, with the seconds that snapshots have cost so far. (Median seconds from one to the next
        without its cost, of a snapshot) as soon as that is known, once."""
        if len(self._steps) == WARM_STEPS + MEASURED_STEPS:
            return None
        if self._last is not None:
            began, stalled = self._last
            cost = stall_s - stalled
            self._steps.append((now_s - began - cost, cost))
        self._last = now_s, stall_s
        if len(self._steps) < WARM_STEPS + MEASURED_STEPS:
            return None
        steps, costs = zip(*self._steps[WARM_STEPS:], strict=True)
        return statistics.median(steps), statistics.median(costs)
