"""The goodput ledger: every nanosecond of every slot in exactly one state, computed from the events alone.

    part = partition(read_events("runs/a"))
    part.training_goodput            # time of steps that count / wall
    part.states_ns["lost_step"]      # of all slots together

The sum over states equals wall x slots, or LedgerError is raised; nothing is ever clamped to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridethrough.ledger.history import History, history
from ridethrough.ledger.lane import LOST, STEP, Lane, Painter, Segment, StepPlan
from ridethrough.ledger.reading import Event, LedgerError, read_events
from ridethrough.ledger.schema import STATES, UNATTRIBUTED_WARNING, UP
from ridethrough.ledger.steps import STATE_NAMES, Ints, SplitEvents
from ridethrough.ledger.walk import first_signs, walk_slot

NUM_COLUMNS = 1500
_KEPT_SEGMENTS = 2_000_000

__all__ = [
    "NUM_COLUMNS",
    "LedgerError",
    "Partition",
    "Segment",
    "partition",
    "partition_history",
    "read_events",
    "rollback_bases",
]


class Picture(NamedTuple):
    """A lane to draw: neighbours of one state joined. Where that leaves too many, the wall is divided into
    `NUM_COLUMNS` equal pieces, each in the state that has most of it. `ends` in ns, `state` codes."""

    ends: Ints
    state: npt.NDArray[np.uint8]

    def pieces(self, start_ns: int) -> Iterator[tuple[str, int, int]]:
        """(state, t0, t1) of each."""
        begin = start_ns
        for end, code in zip(self.ends.tolist(), self.state.tolist(), strict=True):
            yield STATE_NAMES[code], begin, end
            begin = end

    def sampled(self, start_ns: int, num_columns: int) -> Picture:
        """What it shows at the middle of each of `num_columns` equal parts, neighbours joined."""
        if len(self.ends) <= num_columns:
            return self
        edges = start_ns + (np.arange(1, num_columns + 1) * ((int(self.ends[-1]) - start_ns) / num_columns))
        middles = edges - (int(self.ends[-1]) - start_ns) / num_columns / 2
        places = np.minimum(np.searchsorted(self.ends, middles, side="right"), len(self.ends) - 1)
        ends = edges.astype(np.int64)
        ends[-1] = self.ends[-1]
        return _joined(ends, self.state[places])


@dataclass(frozen=True)
class Partition:
    """Where the time of a run went. All times in ns of the run's clock.

    `segments[slot]` covers `[start_ns, end_ns)` in order, without gap or overlap; a large run's lanes are computed
    when they are asked for, and not kept. `states_ns` has every state of `STATES` in that order and sums to
    `wall_ns * slots` exactly; `slot_ns[slot]` are the same of one slot (int64 by state). `pictures[slot]` is its lane
    in at most `NUM_COLUMNS` pieces, to draw.
    """

    start_ns: int
    end_ns: int
    slots: int
    states_ns: dict[str, int]
    segments: Sequence[Sequence[Segment]]
    slot_ns: npt.NDArray[np.int64]
    pictures: list[Picture]

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


class Lanes(Sequence[Lane]):
    """The lanes of all slots; kept while they are few, painted anew when asked for otherwise."""

    def __init__(self, paint: Callable[[int], Lane], slots: int) -> None:
        self._paint = paint
        self._slots = slots
        self._kept: dict[int, Lane] = {}
        self._room = _KEPT_SEGMENTS

    def __len__(self) -> int:
        return self._slots

    def __getitem__(self, slot: int) -> Lane:  # type: ignore[override]
        slot = range(self._slots)[slot]
        lane = self._kept.get(slot)
        if lane is None:
            lane = self._paint(slot)
            if len(lane) <= self._room:
                self._room -= len(lane)
                self._kept[slot] = lane
        return lane

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def partition(events: Iterable[Event] | SplitEvents, end_ns: int | None = None) -> Partition:
    """Divide the wall time of a run. `end_ns`: count a job that has no `job_end` until then (live figures; the step
    under way shows as `partial_step`); its last event if None. Raises LedgerError (see the module)."""
    return partition_history(history(events, end_ns))


def partition_history(past: History) -> Partition:
    """The same from an already sorted history."""
    bases = _lost_above(past)
    numbers = [generation.number for generation in past.generations]
    signs = [first_signs(job) for job in past.jobs]
    segments = Lanes(lambda slot: _lane(past, signs, bases, numbers, slot), past.slots)
    slot_ns = np.zeros((past.slots, len(STATES)), np.int64)
    edges = past.start_ns + (np.arange(1, NUM_COLUMNS + 1) * ((past.end_ns - past.start_ns) / NUM_COLUMNS)).astype(
        np.int64
    )
    edges[-1] = past.end_ns
    pictures = []
    for slot in range(past.slots):
        lane = segments[slot]
        _check_lane(lane, slot, past.start_ns, past.end_ns)
        until = times_until(lane, edges)
        slot_ns[slot] = until[-1]
        pictures.append(_picture(lane, edges, until))
    states_ns = {state: sum(slot_ns[:, code].tolist()) for code, state in enumerate(STATES)}
    part = Partition(past.start_ns, past.end_ns, past.slots, states_ns, segments, slot_ns, pictures)
    _check_sum(part)
    return part


def times_until(lane: Lane, edges: Ints) -> Ints:
    """How long the slot had been in each state (second axis: codes) at each of the rising moments `edges`, ns."""
    until = np.zeros((len(edges), len(STATES)), np.int64)
    if not len(lane):
        return until
    took = np.diff(lane.ends, prepend=lane.start_ns)
    at = np.searchsorted(lane.ends, edges)
    for code in np.flatnonzero(np.bincount(lane.state)):
        places = np.flatnonzero(lane.state == code)
        done = np.concatenate([[0], np.cumsum(took[places])])
        until[:, code] = done[np.searchsorted(places, at, side="right")]
    until[np.arange(len(edges)), lane.state[at]] -= lane.ends[at] - edges  # the segment that an edge cuts
    return until


def _picture(lane: Lane, edges: Ints, until: Ints) -> Picture:
    exact = _joined(lane.ends, lane.state)
    if len(exact.ends) <= len(edges):
        return exact
    return _joined(edges, np.diff(until, axis=0, prepend=0).argmax(axis=1).astype(np.uint8))


def _joined(ends: Ints, state: npt.NDArray[np.uint8]) -> Picture:
    last = np.append(state[1:] != state[:-1], True)[: len(state)]
    return Picture(ends[last], state[last])


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
    _check_sum(part)


def _check_lane(lane: Lane, slot: int, start_ns: int, end_ns: int) -> None:
    """The same for a lane's columns: its ends rise strictly from the start to the end of the run."""
    if len(lane) and (lane.start_ns != start_ns or not (np.diff(lane.ends, prepend=start_ns) > 0).all()):
        raise LedgerError(f"slot {slot}: a segment does not begin where the last ended")
    covered = int(lane.ends[-1]) if len(lane) else start_ns
    if covered != end_ns:
        raise LedgerError(f"slot {slot}: covered until {covered}, not until the end {end_ns}")


def _check_sum(part: Partition) -> None:
    total, wall = sum(part.states_ns.values()), part.wall_ns * part.slots
    if total != wall:
        raise LedgerError(f"the states sum to {total} ns, wall x slots is {wall} ns: {total - wall:+} ns")


def _lane(past: History, signs: list[list[int]], bases: Ints, numbers: list[int], slot: int) -> Lane:
    """All jobs of one slot; between two jobs it is `queued`."""
    table = next((g.steps[slot].table for g in past.generations if slot in g.steps), None)
    plan = StepPlan(table) if table is not None else None
    painter = Painter(past.start_ns, room=len(plan.ends) if plan is not None else 0)
    for index, job in enumerate(past.jobs):
        painter.job, painter.ordinal, painter.end_ns = index, -1, job.end_ns
        painter.to(job.start_ns, "queued")
        walk_slot(painter, job, signs[index], slot, plan)
    lane = painter.lane(numbers)
    lost = (lane.state == STEP) & (lane.ordinal >= 0) & (lane.step > bases[lane.ordinal])
    lane.state[lost] = LOST
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
        if generation.base is not None and (lowest is None or generation.steps):
            lowest = generation.base if lowest is None else min(lowest, generation.base)
    return bases


def _lost_above(past: History) -> Ints:
    """The same by ordinal; where nothing is lost, above every step."""
    bases = rollback_bases(past)
    never = np.iinfo(np.int64).max
    return np.array([bases.get((g.job, g.number), never) for g in past.generations] or [never], np.int64)
