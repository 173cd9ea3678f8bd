"""What a keeper writes into the run's record, every few seconds: what a fault would cost, and what its memory holds."""

from __future__ import annotations

import time

from ridethrough.checkpoint import held, host_memory
from ridethrough.checkpoint.keeping import Keeping

REPORT_S = 5.0


class Telling:
    """Main thread of the keeper."""

    def __init__(self, keeping: Keeping) -> None:
        self.keeping = keeping
        self.told: held.Key = held.NOTHING
        self.told_at = -REPORT_S
        self.weighed: dict[str, int] = {}
        self.weighed_at = time.monotonic()

    def base(self) -> None:
        """The newest state that a recovery could load: on rank 0's node, if it has changed."""
        keeping, now = self.keeping, time.monotonic()
        with keeping.wake:
            bases = [tier.base for tier in keeping.tiers.values() if tier.leads and tier.base != held.NOTHING]
        newest = max(bases, default=self.told)
        if newest == self.told or now - self.told_at < REPORT_S:
            return
        self.told, self.told_at = newest, now
        neighbours = keeping.neighbours
        replicated = neighbours is not None and bool(neighbours.holds(newest))
        seconds = neighbours.seconds if neighbours is not None else None
        keeping.recorder.emit("memory", step=newest[2], replicated=replicated, replica_s=seconds)

    def weight(self, last: bool = False) -> None:
        """What the snapshots of this node took at most since it was told before: if there is something, and when the
        keeper ends (`last`)."""
        with self.keeping.wake:
            groups = list(self.keeping.groups.values())
            waiting = [s for group in groups for s in group.snapshots.values() if group.complete(s)]
            queued_bytes = sum(part.payload.nbytes for snapshot in waiting for part in snapshot.parts.values())
        now = {"bytes": host_memory.total_bytes(), "queued": len(waiting), "queued_bytes": queued_bytes}
        self.weighed = {name: max(value, self.weighed.get(name, 0)) for name, value in now.items()}
        if self.weighed["bytes"] and (last or time.monotonic() - self.weighed_at >= REPORT_S):
            self.keeping.recorder.emit("host_memory", **self.weighed)
            self.weighed, self.weighed_at = {}, time.monotonic()
