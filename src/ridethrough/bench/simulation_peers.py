"""Recovery by starting everything anew, as launchers without rungs, a submitted job, or pods do."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ridethrough.bench.simulation_model import Fleet, Mechanism
from ridethrough.cluster.kubelet import ContainerBackoff


@dataclass(frozen=True)
class Recovery:
    """When a failure was declared, when all were out, when the training function is called again (seconds of the
    simulation), and why the job ended, if it did."""

    declared_s: float
    out_s: float
    called_s: float
    ended: str | None = None

    def joined(self, later: Recovery) -> Recovery:
        """A failure during this recovery: it is the same incident, over when the later one is."""
        return replace(self, called_s=max(self.called_s, later.called_s), ended=later.ended)


class WholeJobRecovery:
    """Every process ends and is started again. A node that is lost must be replaced first: from the spares, else after
    its repair."""

    def __init__(self, fleet: Fleet, mechanism: Mechanism) -> None:
        self.fleet, self.mechanism = fleet, mechanism
        self.known_s = 0.0
        self._begun_s = 0.0
        self._pod = ContainerBackoff()
        self._away: list[float] = []  # when each lost node's replacement is there

    def start(self, now_s: float) -> str | None:
        self._begun_s = now_s
        return None

    def progressed(self, step: int, now_s: float) -> None:
        return None

    def recover(self, kind: str, fault_s: float, step: int, draw: random.Random) -> Recovery:
        times = self.mechanism.times
        declared_s = fault_s + times.detect_s.get(kind, 0.0)
        out_s = declared_s + times.teardown_s
        ready_s = out_s
        if kind == "node_loss":
            ready_s = max(out_s, self._node_s(fault_s))
        if self.mechanism.pods:
            # Every container ends when its collective does, so all have the same memory of restarts.
            wait_s, self._pod = self._pod.ended(out_s - self._begun_s)
            ready_s += wait_s
        self._begun_s = ready_s
        self.known_s = out_s
        return Recovery(declared_s, out_s, ready_s + times.rebuild_s["all"])

    def _node_s(self, now_s: float) -> float:
        """When a node is there in the lost one's place; its repair adds a spare again."""
        back = sorted(self._away)
        in_repair = [at_s for at_s in back if at_s > now_s]
        self._away = [*in_repair, now_s + self.fleet.repair_s]
        if len(in_repair) < self.fleet.num_spares:
            return now_s
        return in_repair[len(in_repair) - self.fleet.num_spares] if in_repair else now_s + self.fleet.repair_s
