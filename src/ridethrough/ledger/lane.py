"""One slot's life as columns. The painter only moves forward: a segment begins where the last one ended, so that there
is no gap and no overlap by construction, also when two processes of a slot (a dead one and its replacement)
contradict each other by a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ridethrough.ledger.steps import STATE_CODES, STATE_NAMES, UNATTRIBUTED, Ints, Steps

STEP = STATE_CODES["step"]
LOST = STATE_CODES["lost_step"]
_COLUMNS = {"ends": np.int64, "state": np.uint8, "job": np.int32, "ordinal": np.int32, "step": np.int64}


class Segment(NamedTuple):
    """`[t0, t1)` in one state; ns of the run's clock. `step` is set for finished steps and what lies inside."""

    state: str
    t0: int
    t1: int
    job: int
    generation: int | None
    step: int | None


class Interval(NamedTuple):
    """A carved-out activity; `end` None: it never ended."""

    state: str
    begin: int
    end: int | None


class Lane(Sequence[Segment]):
    """All segments of a slot, in order, from `start_ns` on. Columns: `ends` (ns), `state` (codes), `job`, `ordinal`
    (index into the run's generations, -1: none) and `step` (-1: none)."""

    def __init__(self, start_ns: int, columns: dict[str, npt.NDArray[Any]], numbers: Sequence[int]) -> None:
        self.start_ns = start_ns
        self.ends: Ints = columns["ends"]
        self.state: npt.NDArray[np.uint8] = columns["state"]
        self.job, self.ordinal = columns["job"], columns["ordinal"]
        self.step: Ints = columns["step"]
        self._numbers = numbers

    @property
    def begins(self) -> Ints:
        return np.concatenate([np.array([self.start_ns] if len(self) else [], np.int64), self.ends[:-1]])

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        ordinal, step = int(self.ordinal[place]), int(self.step[place])
        return Segment(
            STATE_NAMES[self.state[place]],
            int(self.ends[place - 1]) if place else self.start_ns,
            int(self.ends[place]),
            int(self.job[place]),
            self._numbers[ordinal] if ordinal >= 0 else None,
            step if step >= 0 else None,
        )

    def __iter__(self) -> Iterator[Segment]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Painter:
    """Appends segments from a cursor on; a moment before the cursor paints nothing, nor does one after `end_ns`."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = self.cursor = start_ns
        self.end_ns = start_ns
        self.job = 0
        self.ordinal = -1
        self._size = 0
        self._columns = {name: np.zeros(256, kind) for name, kind in _COLUMNS.items()}

    def lane(self, numbers: Sequence[int]) -> Lane:
        """What was painted; `numbers`: the generations' numbers by ordinal."""
        return Lane(self.start_ns, {n: column[: self._size].copy() for n, column in self._columns.items()}, numbers)

    def to(self, t_ns: int, state: str, step: int | None = None) -> None:
        t_ns = min(t_ns, self.end_ns)
        if t_ns <= self.cursor:
            return
        self.cursor = t_ns
        columns, at = self._columns, self._size
        new = (STATE_CODES[state], self.job, self.ordinal, -1 if step is None else step)
        if at and new[0] != STEP and new == self._last():
            columns["ends"][at - 1] = t_ns
            return
        self._reserve(1)
        columns = self._columns
        columns["ends"][at] = t_ns
        columns["state"][at], columns["job"][at], columns["ordinal"][at], columns["step"][at] = new
        self._size += 1

    def fill(self, t_ns: int, base: str, carved: Iterable[Interval], step: int | None = None) -> None:
        """Up to `t_ns`: the carved intervals where they lie, `base` in between."""
        for state, begin, end in carved:
            if begin >= t_ns:
                break
            if end is None or end > self.cursor:
                self.to(min(begin, t_ns), base, step)
                self.to(t_ns if end is None else min(end, t_ns), state, step)
        self.to(t_ns, base, step)

    def steps(self, steps: Steps, first: int, last: int, gap: str) -> int:
        """Paint regular steps: each after the last, with parts in order inside of it. `gap` is what lies before the
        first. Returns how many were painted: fewer than asked for if one is irregular. All must end by `end_ns`."""
        t0, t1 = steps.t0_ns[first:last], steps.t1_ns[first:last]
        count = self._num_regular(steps, first, t0, t1)
        if not count:
            return 0
        t0, t1 = t0[:count], t1[:count]
        begin, num_parts, owner = _parts_of(steps, first, first + count)
        table, parts = steps.table, slice(begin, begin + len(owner))
        before = np.cumsum(num_parts) - num_parts  # parts of earlier steps
        at = 2 * (np.arange(count) + before)  # where a step's entries begin: gap, (step, part)..., step
        ends = np.empty(2 * (count + len(owner)), np.int64)
        state = np.full(len(ends), STEP, np.uint8)
        number = np.repeat(steps.step[first : first + count], 2 + 2 * num_parts)
        ends[at], ends[at + 1 + 2 * num_parts] = t0, t1
        state[at], number[at] = UNATTRIBUTED, -1
        state[0] = STATE_CODES[gap]
        if len(owner):
            place = at[owner] + 1 + 2 * (np.arange(len(owner)) - before[owner])
            ends[place], ends[place + 1] = table.part_a[parts], table.part_b[parts]
            state[place + 1] = table.part_state[parts]
        kept = np.flatnonzero(np.diff(ends, prepend=self.cursor) > 0)
        self._reserve(len(kept))
        new = slice(self._size, self._size + len(kept))
        columns = self._columns
        columns["ends"][new], columns["state"][new], columns["step"][new] = ends[kept], state[kept], number[kept]
        columns["job"][new], columns["ordinal"][new] = self.job, self.ordinal
        self._size += len(kept)
        self.cursor = max(self.cursor, int(t1[-1]))
        return count

    def _num_regular(self, steps: Steps, first: int, t0: Ints, t1: Ints) -> int:
        if not len(t0) or t0[0] < self.cursor:
            return 0
        good = t1 >= t0
        good[1:] &= t0[1:] >= t1[:-1]
        begin, _, owner = _parts_of(steps, first, first + len(t0))
        if len(owner):
            a = steps.table.part_a[begin : begin + len(owner)]
            b = steps.table.part_b[begin : begin + len(owner)]
            least = t0[owner]
            follows = owner[1:] == owner[:-1]
            least[1:][follows] = b[:-1][follows]
            bad = (a < least) | (b < a) | (b > t1[owner])
            good[owner[bad]] = False
        return len(good) if good.all() else int(np.argmin(good))

    def _last(self) -> tuple[int, ...]:
        place = self._size - 1
        return tuple(int(self._columns[name][place]) for name in ("state", "job", "ordinal", "step"))

    def _reserve(self, count: int) -> None:
        need, have = self._size + count, len(self._columns["ends"])
        if need > have:
            size = max(need, 2 * have)
            self._columns = {n: np.concatenate([c, np.zeros(size - have, c.dtype)]) for n, c in self._columns.items()}


def _parts_of(steps: Steps, first: int, last: int) -> tuple[int, Ints, npt.NDArray[np.intp]]:
    """Of some rows: where their parts begin, how many each has, and for each part the row it is of (from 0)."""
    table, low, high = steps.table, steps.first + first, steps.first + last
    begin = int(table.part_end[low - 1]) if low else 0
    num_parts = np.diff(table.part_end[low:high], prepend=begin)
    return begin, num_parts, np.repeat(np.arange(high - low), num_parts)
