"""Blocks: a closed segment of events without loss in a tenth of the space, read a hundred times faster.

A segment's steps become columns, all else stays the text that it was. Layout of a `.block` file:

    RTBLOCK1\\n
    one line of JSON: {"num_lines", "columns": [{"name", "kind", ...}, ...], "states": [...], "xxh3": ...}\\n
    the columns, one after the other, each zlib-compressed with the bytes of its numbers transposed

Columns of integers hold differences (see `_step_columns`), in the smallest integer type that holds them all; a
column of one value has no bytes. `expand` gives back every event as it was written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from ridethrough.ledger.steps import STATE_CODES, UNATTRIBUTED, Event, Floats, Ints, StepTable

MAGIC = b"RTBLOCK1\n"
_LEVEL = 6
_REQUIRED = ("t_ns", "generation", "rank", "step", "t0_ns", "t1_ns")
_LIMIT = 1 << 60


class BlockError(ValueError):
    """A block that is damaged or of a newer version; the message names what is wrong."""


@dataclass
class BlockSteps:
    """Steps in the order of their lines. `parts_*` as in StepTable, with the block's own `states`; a metric is
    (values, present): int64 or float64, and None where every step has it."""

    line: Ints
    t_ns: Ints
    generation: Ints
    rank: Ints
    step: Ints
    t0_ns: Ints
    t1_ns: Ints
    part_count: Ints
    part_state: Ints
    part_a: Ints
    part_b: Ints
    states: list[str]
    metrics: dict[str, tuple[Ints | Floats, npt.NDArray[np.bool_] | None]]


@dataclass
class Block:
    """A segment's content: steps, and every other line with its number (from 0)."""

    num_lines: int
    steps: BlockSteps
    rest_lines: Ints
    rest: list[Event] = field(default_factory=list)


def make_block(lines: Iterable[bytes]) -> bytes:
    """The block of a segment's lines. Lines that are no events are left out (a cut line before a header).

    A step that does not fit the columns (missing fields, values that are no numbers) stays text.
    """
    packer = _Packer()
    for number, line in enumerate(lines):
        packer.add(number, line.strip())
    return packer.block()


def write_block(steps: BlockSteps, rest_lines: Ints, rest: list[bytes], num_lines: int) -> bytes:
    """A block from columns; `rest` are the other lines as they were written."""
    columns: list[dict[str, Any]] = []
    data: list[bytes] = []

    def put(name: str, values: npt.NDArray[Any]) -> None:
        about, packed = _pack(values)
        columns.append({"name": name, **about})
        data.append(packed)

    for name, values in _step_columns(steps).items():
        put(name, values)
    for name, (values, present) in steps.metrics.items():
        put(f"metric:{name}", values)
        if present is not None:
            put(f"present:{name}", present.astype(np.int64))
    put("rest_line", np.diff(rest_lines, prepend=0))
    text = zlib.compress(b"[" + b",".join(rest) + b"]", _LEVEL)
    columns.append({"name": "rest", "kind": "json", "count": len(rest), "bytes": len(text)})
    data.append(text)
    body = b"".join(data)
    head = {"num_lines": num_lines, "states": steps.states, "columns": columns, "xxh3": xxh3_128_hexdigest(body)}
    return MAGIC + json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


def read_block(file: Path) -> Block:
    """Raises BlockError when the file is no block or damaged (the hash is checked), OSError as reading does."""
    raw = file.read_bytes()
    if not raw.startswith(MAGIC):
        raise BlockError(f"{file} is no block of this version: upgrade ridethrough, or it is damaged")
    end = raw.find(b"\n", len(MAGIC))
    body = memoryview(raw)[end + 1 :]
    try:
        head = json.loads(raw[len(MAGIC) : end])
        if xxh3_128_hexdigest(body) != head["xxh3"]:
            raise BlockError(f"{file} is damaged: its content does not match its hash; remove it to read the rest")
        columns: dict[str, Any] = {}
        at = 0
        for about in head["columns"]:
            columns[about["name"]] = _unpack(about, body[at : at + about["bytes"]])
            at += about["bytes"]
        steps = _steps_of(columns, head["states"])
        return Block(head["num_lines"], steps, np.cumsum(columns["rest_line"]), columns["rest"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        if isinstance(error, BlockError):
            raise
        raise BlockError(f"{file} is damaged ({type(error).__name__}: {error}): remove it to read the rest") from error


def expand(block: Block) -> Iterator[tuple[int, Event]]:
    """Every event with its line's number, in the order of the lines."""
    steps, rest = _step_events(block.steps), iter(zip(block.rest_lines.tolist(), block.rest, strict=True))
    step, other = next(steps, None), next(rest, None)
    while step is not None or other is not None:
        if other is None or (step is not None and step[0] < other[0]):
            assert step is not None
            yield step
            step = next(steps, None)
        else:
            yield other
            other = next(rest, None)


def tables(steps: BlockSteps, shift_ns: Ints | None) -> dict[int, StepTable]:
    """The steps by rank for the ledger; `shift_ns`: what to add to each row's times (another boot's clock)."""
    if not len(steps.step):
        return {}
    codes = np.array([STATE_CODES.get(s, UNATTRIBUTED) for s in steps.states], np.uint8)
    t0, t1, a, b = steps.t0_ns, steps.t1_ns, steps.part_a, steps.part_b
    if shift_ns is not None:
        t0, t1 = t0 + shift_ns, t1 + shift_ns
        per_part = np.repeat(shift_ns, steps.part_count)
        a, b = a + per_part, b + per_part
    metrics = {}
    for name, (values, present) in steps.metrics.items():
        column = _small_floats(values)
        metrics[name] = column if present is None else np.where(present, column, np.float32(np.nan))
    part_state = codes[steps.part_state] if len(steps.part_state) else np.zeros(0, np.uint8)
    generation, step, part_end = (_small_ints(c) for c in (steps.generation, steps.step, np.cumsum(steps.part_count)))
    whole = StepTable(generation, step, t0, t1, part_end, part_state, a, b, metrics)
    if (steps.rank == steps.rank[0]).all():
        return {int(steps.rank[0]): whole}
    ranks = np.unique(steps.rank)
    return {int(rank): whole.take(np.flatnonzero(steps.rank == rank)) for rank in ranks}


def _step_columns(steps: BlockSteps) -> dict[str, npt.NDArray[Any]]:
    """As stored: small numbers, since most of a step follows from the one before."""
    took = steps.t1_ns - steps.t0_ns
    return {
        "line": np.diff(steps.line, prepend=0),
        "generation": np.diff(steps.generation, prepend=0),
        "rank": np.diff(steps.rank, prepend=0),
        "step": np.diff(steps.step, prepend=0),
        "gap": np.diff(steps.t1_ns, prepend=0) - took,  # from the last step's end to this one's begin
        "took": took,
        "written": steps.t_ns - steps.t1_ns,
        "part_count": steps.part_count,
        "part_state": steps.part_state,
        "part_after": steps.part_a - np.repeat(steps.t0_ns, steps.part_count),
        "part_took": steps.part_b - steps.part_a,
    }


def _steps_of(columns: dict[str, Any], states: list[str]) -> BlockSteps:
    t1 = np.cumsum(columns["gap"] + columns["took"])
    t0 = t1 - columns["took"]
    part_a = columns["part_after"] + np.repeat(t0, columns["part_count"])
    metrics = {}
    for name, values in columns.items():
        kind, _, metric = name.partition(":")
        if kind == "metric":
            present = columns.get(f"present:{metric}")
            metrics[metric] = (values, None if present is None else present.astype(bool))
    return BlockSteps(
        line=np.cumsum(columns["line"]),
        t_ns=t1 + columns["written"],
        generation=np.cumsum(columns["generation"]),
        rank=np.cumsum(columns["rank"]),
        step=np.cumsum(columns["step"]),
        t0_ns=t0,
        t1_ns=t1,
        part_count=columns["part_count"],
        part_state=columns["part_state"],
        part_a=part_a,
        part_b=part_a + columns["part_took"],
        states=states,
        metrics=metrics,
    )


def _step_events(steps: BlockSteps) -> Iterator[tuple[int, Event]]:
    names = ("t_ns", "generation", "rank", "step", "t0_ns", "t1_ns", "part_count", "line")
    rows = zip(*(getattr(steps, name).tolist() for name in names), strict=True)
    labels = [steps.states[code] for code in steps.part_state.tolist()]
    parts = list(zip(labels, steps.part_a.tolist(), steps.part_b.tolist(), strict=True))
    metrics = {
        name: (values.tolist(), present.tolist() if present is not None else None)
        for name, (values, present) in steps.metrics.items()
    }
    at = 0
    for row, (t_ns, generation, rank, step, t0, t1, count, line) in enumerate(rows):
        event: Event = {"t_ns": t_ns, "kind": "step", "generation": generation, "rank": rank, "step": step}
        event |= {"t0_ns": t0, "t1_ns": t1, "parts": [list(part) for part in parts[at : at + count]]}
        at += count
        for name, (values, present) in metrics.items():
            if present is None or present[row]:
                event[name] = values[row]
        yield line, event


class _Packer:
    """Divides lines into rows of columns and text."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._parts: list[tuple[int, int, int]] = []
        self._states: dict[str, int] = {}
        self._metrics: dict[str, tuple[type, list[int], list[Any]]] = {}  # type, rows, values
        self._rest: list[bytes] = []
        self._rest_lines: list[int] = []
        self._num_lines = 0

    def add(self, number: int, line: bytes) -> None:
        self._num_lines = number + 1
        try:
            event = json.loads(line)
        except ValueError:
            return
        if not isinstance(event, dict) or not (event.get("kind") == "step" and self._fits(event)):
            self._rest.append(line)
            self._rest_lines.append(number)
            return
        parts = event["parts"]
        row = len(self._rows)
        self._rows.append((number, *(event[name] for name in _REQUIRED), len(parts)))
        for state, a, b in parts:
            self._parts.append((self._states.setdefault(state, len(self._states)), a, b))
        for name, value in event.items():
            if name not in _REQUIRED and name not in ("kind", "parts"):
                _, rows, values = self._metrics.setdefault(name, (type(value), [], []))
                rows.append(row)
                values.append(value)

    def _fits(self, event: Event) -> bool:
        if not all(_is_int(event.get(name)) for name in _REQUIRED):
            return False
        parts = event.get("parts")
        if not isinstance(parts, list) or not all(
            isinstance(p, list) and len(p) == 3 and isinstance(p[0], str) and _is_int(p[1]) and _is_int(p[2])
            for p in parts
        ):
            return False
        for name, value in event.items():
            if name in _REQUIRED or name in ("kind", "parts"):
                continue
            if not (type(value) is float or _is_int(value)):
                return False
            if name in self._metrics and self._metrics[name][0] is not type(value):
                return False
        return True

    def block(self) -> bytes:
        count = len(self._rows)
        rows = np.array(self._rows, np.int64).reshape(count, 8)
        parts = np.array(self._parts, np.int64).reshape(len(self._parts), 3)
        metrics: dict[str, tuple[Any, Any]] = {}
        for name, (kind, at, values) in self._metrics.items():
            column = np.zeros(count, np.float64 if kind is float else np.int64)
            column[at] = values
            present = None
            if len(at) < count:
                present = np.zeros(count, bool)
                present[at] = True
            metrics[name] = (column, present)
        columns = dict(zip(("line", *_REQUIRED, "part_count"), rows.T, strict=True))
        state, a, b = parts.T
        steps = BlockSteps(**columns, part_state=state, part_a=a, part_b=b, states=list(self._states), metrics=metrics)
        return write_block(steps, np.array(self._rest_lines, np.int64), self._rest, self._num_lines)


def _is_int(value: Any) -> bool:
    return type(value) is int and -_LIMIT < value < _LIMIT


def _pack(values: npt.NDArray[Any]) -> tuple[dict[str, Any], bytes]:
    count = len(values)
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            small = values.astype(np.float32)
        if np.array_equal(small.astype(np.float64).view(np.int64), values.view(np.int64)):
            values = small
    else:
        low, high = (int(values.min()), int(values.max())) if count else (0, 0)
        if low == high:
            return {"kind": "same", "value": low, "count": count, "bytes": 0}, b""
        values = values.astype(next(t for t in ("<i1", "<i2", "<i4", "<i8") if _holds(t, low, high)))
    kind = values.dtype.newbyteorder("<").str
    width = values.dtype.itemsize
    packed = zlib.compress(np.ascontiguousarray(values.view(np.uint8).reshape(count, width).T).tobytes(), _LEVEL)
    return {"kind": kind, "count": count, "bytes": len(packed)}, packed


def _holds(kind: str, low: int, high: int) -> bool:
    about = np.iinfo(kind)
    return bool(about.min <= low and high <= about.max)


def _unpack(about: dict[str, Any], data: memoryview) -> Any:
    if about["kind"] == "same":
        return np.full(about["count"], about["value"], np.int64)
    raw = zlib.decompress(data)
    if about["kind"] == "json":
        return json.loads(raw)
    dtype = np.dtype(about["kind"])
    lanes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, about["count"])
    values = np.ascontiguousarray(lanes.T).reshape(-1).view(dtype)
    return values if dtype.kind == "f" else values.astype(np.int64)


def _small_ints(values: Ints) -> npt.NDArray[Any]:
    """The same in half the memory where they fit: a large run has millions."""
    fits = not len(values) or (int(values.min()) >= -(1 << 31) and int(values.max()) < 1 << 31)
    return values.astype(np.int32) if fits else values


def _small_floats(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As float32 where that loses nothing, else float64."""
    if values.dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    wide = values.astype(np.float64)
    return small if np.array_equal(small.astype(np.float64), wide, equal_nan=True) else wide
