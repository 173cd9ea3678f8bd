"""One slot's life as columns. The painter only moves forward: a segment begins where the last one ended, so that there
is no gap and no overlap by construction, also when two processes of a slot (a dead one and its replacement)
contradict each other by a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ridethrough.ledger.steps import STATE_CODES, STATE_NAMES, UNATTRIBUTED, Ints, StepTable

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

    def __init__(self, start_ns: int, room: int = 0) -> None:
        """`room`: for so many segments at first."""
        self.start_ns = self.cursor = start_ns
        self.end_ns = start_ns
        self.job = 0
        self.ordinal = -1
        self._size = 0
        self._last: tuple[int, ...] | None = None
        self._columns = {name: np.zeros(256 + room, kind) for name, kind in _COLUMNS.items()}

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
        if new == self._last and new[0] != STEP:
            columns["ends"][at - 1] = t_ns
            return
        self._last = new
        if at == len(columns["ends"]):
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

    def steps(self, plan: StepPlan, first: int, last: int, gap: str) -> int:
        """Paint regular rows `first` to `last` of a table: each after the last, its parts in order inside of it. `gap`
        is what lies before the first. Returns how many were painted: fewer than asked for if one is irregular. All
        must end by `end_ns`."""
        begin = int(plan.table.t0_ns[first])
        if begin < self.cursor:
            return 0
        last = plan.regular_until(first, last)
        if last <= first:
            return 0
        self.to(begin, gap)
        old = slice(int(plan.row_entry[first]), int(plan.gap_entry[last]))
        count = old.stop - old.start
        self._reserve(count)
        new = slice(self._size, self._size + count)
        columns = self._columns
        columns["ends"][new], columns["state"][new], columns["step"][new] = (
            plan.ends[old],
            plan.state[old],
            plan.number[old],
        )
        columns["job"][new], columns["ordinal"][new] = self.job, self.ordinal
        self._size += count
        self._last = None
        self.cursor = max(self.cursor, int(plan.table.t1_ns[last - 1]))
        return last - first

    def _reserve(self, count: int) -> None:
        need, have = self._size + count, len(self._columns["ends"])
        if need > have:
            size = max(need, 2 * have)
            self._columns = {n: np.concatenate([c, np.zeros(size - have, c.dtype)]) for n, c in self._columns.items()}


class StepPlan:
    """The segments of all steps of a table, made at once: for each row the gap before it (unattributed), then `step`
    and its parts in turn; those without length are left out. Row i's begin at `row_entry[i]`, its gap at
    `gap_entry[i]`."""

    def __init__(self, table: StepTable) -> None:
        self.table = table
        rows = len(table)
        begin = table.part_begin()
        num_parts = table.part_end - begin
        owner = np.repeat(np.arange(rows), num_parts)
        at = 2 * (np.arange(rows) + begin)
        ends = np.empty(2 * (rows + len(owner)), np.int64)
        state = np.full(len(ends), STEP, np.uint8)
        number = np.repeat(table.step, 2 + 2 * num_parts)
        ends[at], ends[at + 1 + 2 * num_parts] = table.t0_ns, table.t1_ns
        state[at], number[at] = UNATTRIBUTED, -1
        place = at[owner] + 1 + 2 * (np.arange(len(owner)) - begin[owner])
        ends[place], ends[place + 1], state[place + 1] = table.part_a, table.part_b, table.part_state
        long = np.empty(len(ends), bool)
        long[:1], long[1:] = True, ends[1:] > ends[:-1]
        num_kept = np.add.reduceat(long, at, dtype=np.int64) if rows else np.zeros(0, np.int64)
        self.gap_entry = np.concatenate([[0], np.cumsum(num_kept)])
        self.row_entry = self.gap_entry[:-1] + long[at]
        kept = np.flatnonzero(long)
        self.ends, self.state, self.number = ends[kept], state[kept], number[kept]
        self._irregular, self._late = self._find_irregular(owner)

    def regular_until(self, first: int, last: int) -> int:
        """The first row that can't be painted with those from `first` on, or `last`."""
        place = bisect_left(self._irregular, first)
        last = min(last, self._irregular[place]) if place < len(self._irregular) else last
        place = bisect_right(self._late, first)
        return min(last, self._late[place]) if place < len(self._late) else last

    def _find_irregular(self, owner: npt.NDArray[np.intp]) -> tuple[list[int], list[int]]:
        """Rows whose parts do not lie in order inside of them, and rows that begin before the last one ended."""
        table = self.table
        bad = table.t1_ns < table.t0_ns
        if len(owner):
            least = table.t0_ns[owner]
            follows = owner[1:] == owner[:-1]
            least[1:][follows] = table.part_b[:-1][follows]
            wrong = (table.part_a < least) | (table.part_b < table.part_a) | (table.part_b > table.t1_ns[owner])
            bad[owner[wrong]] = True
        late = np.flatnonzero(table.t0_ns[1:] < table.t1_ns[:-1]) + 1
        return np.flatnonzero(bad).tolist(), late.tolist()
