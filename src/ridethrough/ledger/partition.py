"""The goodput ledger: every nanosecond of every slot in exactly one state, computed from the events alone.

    part = partition(read_events("runs/a"))
    part.training_goodput            # time of steps that count / wall
    part.states_ns["lost_step"]      # of all slots together

The sum over states equals wall x slots, or LedgerError is raised; nothing is ever clamped to fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridethrough.ledger.history import History, history
from ridethrough.ledger.reading import Event, LedgerError, read_events
from ridethrough.ledger.schema import STATES, UNATTRIBUTED_WARNING, UP
from ridethrough.ledger.walk import Segment, walk_slot

__all__ = ["LedgerError", "Partition", "Segment", "partition", "partition_history", "read_events"]


@dataclass(frozen=True)
class Partition:
    """Where the time of a run went. All times in ns of the run's clock.

    `segments[slot]` covers `[start_ns, end_ns)` in order, without gap or overlap. `states_ns` has every state of
    `STATES` in that order and sums to `wall_ns * slots` exactly.
    """

    start_ns: int
    end_ns: int
    slots: int
    states_ns: dict[str, int]
    segments: list[list[Segment]]

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def training_goodput(self) -> float:
        """Time of steps that count in the end / wall (per slot, so per job and per GPU second alike); 0 if no time."""
        return self._share(self.states_ns["step"])

    @property
    def infrastructure_goodput(self) -> float:
        """Time in which the slots were up and running the job / wall; 0 if no time passed."""
        return self._share(sum(ns for state, ns in self.states_ns.items() if state in UP))

    @property
    def unattributed(self) -> float:
        """Share of the time that no event explains; above `UNATTRIBUTED_WARNING` deserves a warning."""
        return self._share(self.states_ns["unattributed"])

    @property
    def warning(self) -> str | None:
        """One line when too much is unattributed."""
        if self.unattributed <= UNATTRIBUTED_WARNING:
            return None
        return (
            f"{self.unattributed:.2%} of the time is unattributed (more than {UNATTRIBUTED_WARNING:.1%}): "
            "events are missing, or the loop does work between steps"
        )

    def _share(self, ns: int) -> float:
        total = self.wall_ns * self.slots
        return ns / total if total else 0.0


def partition(events: Iterable[Event], end_ns: int | None = None) -> Partition:
    """Divide the wall time of a run. `end_ns`: count a job that has no `job_end` until then (live figures; the step
    under way shows as `partial_step`); its last event if None. Raises LedgerError (see the module)."""
    return partition_history(history(events, end_ns))


def partition_history(past: History) -> Partition:
    """The same from an already sorted history."""
    segments = [_slot(past, slot) for slot in range(past.slots)]
    _reclassify(past, segments)
    states_ns = dict.fromkeys(STATES, 0)
    for lane in segments:
        for segment in lane:
            states_ns[segment.state] += segment.t1 - segment.t0
    part = Partition(past.start_ns, past.end_ns, past.slots, states_ns, segments)
    check(part)
    return part


def check(part: Partition) -> None:
    """Raise LedgerError unless every slot is covered exactly once and the sum is wall x slots."""
    for slot, lane in enumerate(part.segments):
        cursor = part.start_ns
        for segment in lane:
            if segment.t0 != cursor or segment.t1 <= segment.t0:
                raise LedgerError(f"slot {slot}: segment {segment} does not begin where the last ended ({cursor})")
            cursor = segment.t1
        if cursor != part.end_ns:
            raise LedgerError(f"slot {slot}: covered until {cursor}, not until the end {part.end_ns}")
    total, wall = sum(part.states_ns.values()), part.wall_ns * part.slots
    if total != wall:
        raise LedgerError(f"the states sum to {total} ns, wall x slots is {wall} ns: {total - wall:+} ns")


def _slot(past: History, slot: int) -> list[Segment]:
    """All jobs of one slot; between two jobs it is `queued`."""
    lane: list[Segment] = []
    for index, job in enumerate(past.jobs):
        if index and past.jobs[index - 1].end_ns < job.start_ns:
            lane.append(Segment("queued", past.jobs[index - 1].end_ns, job.start_ns, index, None, None))
        lane.extend(walk_slot(job, index, slot))
    return lane


def rollback_bases(past: History) -> dict[tuple[int, int], int]:
    """For each generation (job, number) that something resumed after: steps above this are lost.

    A generation counts as resumed if it finished a step; one that fell over before changes nothing, unless it is
    the newest.
    """
    bases: dict[tuple[int, int], int] = {}
    lowest: int | None = None
    for generation in reversed(past.generations):
        if lowest is not None:
            bases[generation.job, generation.number] = lowest
        if generation.base is not None and (lowest is None or generation.steps()):
            lowest = generation.base if lowest is None else min(lowest, generation.base)
    return bases


def _reclassify(past: History, segments: list[list[Segment]]) -> None:
    bases = rollback_bases(past)
    for lane in segments:
        for place, segment in enumerate(lane):
            if segment.state != "step" or segment.generation is None or segment.step is None:
                continue
            base = bases.get((segment.job, segment.generation))
            if base is not None and segment.step > base:
                lane[place] = segment._replace(state="lost_step")
