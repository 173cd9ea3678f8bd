"""Finished steps as columns: a run has millions of them, and one Python object each would not fit.

    split = split_events(events)          # steps apart from the rest, from a list of events
    split.steps[0].t1_ns                  # rank 0, in the order of the file(s)

Everything else that happens to a run is rare, and stays a list of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ridethrough.ledger.schema import STATES

Event = dict[str, Any]
Ints = npt.NDArray[np.signedinteger[Any]]  # int64; in a table int32 where that is enough
Floats = npt.NDArray[np.floating[Any]]  # float64; in a table float32 where that loses nothing

STATE_CODES = {state: code for code, state in enumerate(STATES)}
STATE_NAMES = tuple(STATES)
UNATTRIBUTED = STATE_CODES["unattributed"]
FIELDS = frozenset(["t_ns", "kind", "generation", "rank", "step", "t0_ns", "t1_ns", "parts", "host", "role", "file"])
_LIMIT = 1 << 60


@dataclass
class StepTable:
    """Rows are finished steps of one rank; times in ns, int64.

    Row i's parts (carved-out intervals) are rows `part_end[i-1]` to `part_end[i]` of the `part_*` columns;
    `part_state` holds codes of `STATE_CODES`. `metrics`: NaN where a step did not log it.
    """

    generation: Ints
    step: Ints
    t0_ns: Ints
    t1_ns: Ints
    part_end: Ints
    part_state: npt.NDArray[np.uint8]
    part_a: Ints
    part_b: Ints
    metrics: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.step)

    def part_begin(self) -> Ints:
        """Where each row's parts begin."""
        return np.concatenate([np.zeros(min(1, len(self)), np.int64), self.part_end[:-1]])

    def take(self, rows: Ints) -> StepTable:
        """The rows in another order."""
        begin, end = self.part_begin()[rows], self.part_end[rows]
        count = end - begin
        part_end = np.cumsum(count)
        parts = np.arange(int(part_end[-1]) if len(rows) else 0) + np.repeat(begin - (part_end - count), count)
        return StepTable(
            generation=self.generation[rows],
            step=self.step[rows],
            t0_ns=self.t0_ns[rows],
            t1_ns=self.t1_ns[rows],
            part_end=part_end,
            part_state=self.part_state[parts],
            part_a=self.part_a[parts],
            part_b=self.part_b[parts],
            metrics={name: column[rows] for name, column in self.metrics.items()},
        )


def concatenate(tables: list[StepTable]) -> StepTable:
    """All rows, in the order of the tables."""
    if len(tables) == 1:
        return tables[0]
    before = np.cumsum([0, *(len(t.part_a) for t in tables[:-1])])

    def joined(name: str) -> Any:
        return np.concatenate([getattr(t, name) for t in tables])

    def metric(name: str) -> Floats:
        return np.concatenate([t.metrics.get(name, np.full(len(t), np.nan)) for t in tables])

    return StepTable(
        generation=joined("generation"),
        step=joined("step"),
        t0_ns=joined("t0_ns"),
        t1_ns=joined("t1_ns"),
        part_end=np.concatenate([t.part_end + b for t, b in zip(tables, before, strict=True)]),
        part_state=joined("part_state"),
        part_a=joined("part_a"),
        part_b=joined("part_b"),
        metrics={name: metric(name) for name in dict.fromkeys(name for t in tables for name in t.metrics)},
    )


@dataclass
class SplitEvents:
    """A run's events: `rest` in the order of `t_ns` (all that are no well-formed steps), `steps` by rank."""

    rest: list[Event]
    steps: dict[int, StepTable]


class StepRows:
    """Collects step events of any ranks, one at a time."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rows] = {}

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take one event; False if it is no complete step (then nothing is taken)."""
        rank = event.get("rank")
        if not isinstance(rank, int) or rank < 0 or not all(_fits(event.get(name)) for name in _Rows.INTS):
            return False
        parts = event.get("parts") or []
        if not isinstance(parts, list) or not all(_is_part(part) for part in parts):
            return False
        rows = self._ranks.get(rank)
        if rows is None:
            rows = self._ranks[rank] = _Rows()
        rows.add(event)
        return True

    def tables(self) -> dict[int, StepTable]:
        return {rank: rows.table() for rank, rows in self._ranks.items()}


class _Rows:
    INTS = ("generation", "step", "t0_ns", "t1_ns")

    def __init__(self) -> None:
        self._ints: list[tuple[int, int, int, int]] = []
        self._part_end: list[int] = []
        self._parts: list[tuple[int, int, int]] = []
        self._metrics: dict[str, list[float]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        count = len(self._ints)
        self._ints.append((event["generation"], event["step"], event["t0_ns"], event["t1_ns"]))
        for state, a, b in event.get("parts") or ():
            self._parts.append((STATE_CODES.get(state, UNATTRIBUTED) if isinstance(state, str) else UNATTRIBUTED, a, b))
        self._part_end.append(len(self._parts))
        for name, value in event.items():
            if name not in FIELDS and isinstance(value, (int, float)) and not isinstance(value, bool):
                column = self._metrics.setdefault(name, [])
                column.extend([np.nan] * (count - len(column)))
                column.append(value)

    def table(self) -> StepTable:
        count = len(self._ints)
        ints = np.ascontiguousarray(np.array(self._ints, np.int64).reshape(count, 4).T)
        parts = np.ascontiguousarray(np.array(self._parts, np.int64).reshape(len(self._parts), 3).T)
        metrics: dict[str, Floats] = {
            n: np.array(c + [np.nan] * (count - len(c)), np.float64) for n, c in self._metrics.items()
        }
        return StepTable(
            generation=ints[0],
            step=ints[1],
            t0_ns=ints[2],
            t1_ns=ints[3],
            part_end=np.array(self._part_end, np.int64),
            part_state=parts[0].astype(np.uint8),
            part_a=parts[1],
            part_b=parts[2],
            metrics=metrics,
        )


def split_events(events: Iterable[Event]) -> SplitEvents:
    """Divide a list of events (any order) into steps and the rest."""
    rows = StepRows()
    ordered = sorted(events, key=lambda event: event["t_ns"])
    rest = [event for event in ordered if event["kind"] != "step" or not rows.add(event)]
    return SplitEvents(rest, rows.tables())


class Steps:
    """Some neighbouring rows of a table: what one rank did in one generation, in the order of time."""

    __slots__ = ("_first_ns", "_last_ns", "_table", "first", "last")

    def __init__(self, table: StepTable, first: int, last: int) -> None:
        self._table, self.first, self.last = table, first, last
        self._first_ns, self._last_ns = int(table.t1_ns[first]), int(table.t1_ns[last - 1])

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def table(self) -> StepTable:
        return self._table

    @property
    def step(self) -> Ints:
        return self._table.step[self.first : self.last]

    @property
    def t0_ns(self) -> Ints:
        return self._table.t0_ns[self.first : self.last]

    @property
    def t1_ns(self) -> Ints:
        """Never falls."""
        return self._table.t1_ns[self.first : self.last]

    def metric(self, name: str) -> Floats | None:
        column = self._table.metrics.get(name)
        return None if column is None else column[self.first : self.last]

    def num_until(self, t_ns: int) -> int:
        """How many had ended at a moment."""
        if t_ns < self._first_ns or t_ns >= self._last_ns:  # nearly all that is asked for: spares a search
            return 0 if t_ns < self._first_ns else len(self)
        return int(self._table.t1_ns[self.first : self.last].searchsorted(t_ns, side="right"))

    def parts(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(state code, a, b) of one row, counted from the view's first."""
        table, at = self._table, self.first + row
        for place in range(int(table.part_end[at - 1]) if at else 0, int(table.part_end[at])):
            yield int(table.part_state[place]), int(table.part_a[place]), int(table.part_b[place])


def _is_part(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and len(part) == 3 and _fits(part[1]) and _fits(part[2])


def _fits(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LIMIT < value < _LIMIT
