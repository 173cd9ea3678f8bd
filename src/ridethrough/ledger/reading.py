"""Reads a run's event files back, in the order of time, on one clock.

Files of one boot share the monotonic clock and are taken as they are. A file of another boot (the host was started
again, or it is another host) is shifted by the difference of wall and monotonic clock in the headers; that is the
only use of a wall clock here.

A process writes segments, `<host>-<role>-<pid>.jsonl`, then `<host>-<role>-<pid>.1.jsonl` and so on; a closed one may
have become a block (`.block` in place of `.jsonl`, see `blocks`). Where both are there the block counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ridethrough.ledger.blocks import Block, BlockError, expand, read_block, tables
from ridethrough.ledger.steps import Event, Ints, SplitEvents, StepRows, StepTable, concatenate

_HEADER = {"boot_id": str, "mono_ns": int, "wall_ns": int}
_NS_FIELDS = ("t_ns", "t0_ns", "t1_ns", "fault_ns", "declared_ns", "all_out_ns")

__all__ = ["Clock", "Event", "FileParser", "LedgerError", "event_files", "read_events", "read_split"]


class LedgerError(Exception):
    """Events that contradict themselves: a damaged file, or a partition that does not sum to the wall."""


def read_events(run_dir: Path | str) -> list[Event]:
    """All events of a run, sorted by `t_ns` (ties: by file, then by line). A large run has millions: `read_split` is
    what reports use.

    Each gets `host` and `role` from its file's header unless it has its own, and `file` (the file's name). A cut
    last line is left out. Raises LedgerError for damage elsewhere, naming file and line.
    """
    events: list[Event] = []
    clock = Clock()
    for file in event_files(run_dir):
        if block := _block(file):
            parser = FileParser(file.name, clock)
            events.extend(parser.accept(event) for _, event in expand(block))
        else:
            events.extend(_read_file(file, clock))
    return sorted(events, key=lambda event: event["t_ns"])


def read_split(run_dir: Path | str) -> SplitEvents:
    """The same with the steps as columns: all events but steps, sorted, and a table of steps for each rank.

    Raises as `read_events`.
    """
    clock, rows = Clock(), StepRows()
    rest: list[Event] = []
    pieces: dict[int, list[StepTable]] = {}
    for file in event_files(run_dir):
        block = _block(file)
        if block is None:
            for event in _read_file(file, clock):
                if event["kind"] != "step" or not rows.add(event):
                    rest.append(event)
            continue
        parser = FileParser(file.name, clock)
        headers: list[tuple[int, int]] = []
        for line, event in zip(block.rest_lines.tolist(), block.rest, strict=True):
            parser.accept(event)
            if event["kind"] == "header":
                headers.append((line, parser.offset_ns))
            if event["kind"] != "step" or not rows.add(event):
                rest.append(event)
        for rank, table in tables(block.steps, _shifts(block, headers)).items():
            pieces.setdefault(rank, []).append(table)
    for rank, table in rows.tables().items():
        pieces.setdefault(rank, []).append(table)
    steps = {rank: concatenate(pieces.pop(rank)) for rank in sorted(pieces)}
    rest.sort(key=lambda event: event["t_ns"])
    return SplitEvents(rest, steps)


def event_files(run_dir: Path | str) -> list[Path]:
    """The event files there are now: launchers first (their boot gives the clock), then by name and segment."""
    folder = Path(run_dir) / "events"
    blocks = {file.with_suffix(""): file for file in folder.glob("*.block")}
    files = [file for file in folder.glob("*.jsonl") if file.with_suffix("") not in blocks]
    return sorted([*files, *blocks.values()], key=lambda file: (_order(file.name), *segment(file)))


def segment(file: Path) -> tuple[str, int]:
    """The process that a file is of, and the number of the segment (0 is the first)."""
    stem = file.name.rpartition(".")[0]
    process, _, number = stem.rpartition(".")
    return (process, int(number)) if process and number.isdigit() else (stem, 0)


def _order(name: str) -> int:
    order = ("-coordinator-", "-agent-")
    return next((place for place, word in enumerate(order) if word in name), 9)


class Clock:
    """Brings the events of every boot onto the clock of the first one it meets."""

    def __init__(self) -> None:
        self._reference: Event | None = None

    def offset_ns(self, header: Event) -> int:
        """Nanoseconds to add to the times below this header."""
        if self._reference is None:
            self._reference = header
        first = self._reference
        if header["boot_id"] == first["boot_id"]:
            return 0
        return int((header["wall_ns"] - header["mono_ns"]) - (first["wall_ns"] - first["mono_ns"]))


class FileParser:
    """Turns the lines of one file into events; feed it whole lines in order."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.offset_ns = 0
        self._clock = clock
        self._host: str | None = None
        self._role: str | None = None

    def event(self, line: bytes) -> Event:
        """The event of one line. Raises ValueError if it is none (cut or damaged)."""
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(event.get("t_ns"), int) or "kind" not in event:
            raise ValueError("no event")
        return self.accept(event)

    def accept(self, event: Event) -> Event:
        """The same for an event that is already parsed; it is changed in place."""
        if event["kind"] == "header":
            if not all(isinstance(event.get(name), kind) for name, kind in _HEADER.items()):
                raise ValueError("no complete header")
            self._host, self._role = event.get("host"), event.get("role")
            self.offset_ns = self._clock.offset_ns(event)
        event.setdefault("host", self._host)
        event.setdefault("role", self._role)
        event["file"] = self.name
        return _shift(event, self.offset_ns) if self.offset_ns else event


def _shift(event: Event, offset_ns: int) -> Event:
    for name in _NS_FIELDS:
        if isinstance(event.get(name), int):
            event[name] += offset_ns
    if event["kind"] == "step" and event.get("parts"):
        event["parts"] = [[state, a + offset_ns, b + offset_ns] for state, a, b in event["parts"]]
    return event


def _shifts(block: Block, headers: list[tuple[int, int]]) -> Ints | None:
    """For each step of a block what its header shifts it by; None if nothing does."""
    if not any(offset for _, offset in headers):
        return None
    lines, offsets = (np.array(column, np.int64) for column in zip(*headers, strict=True))
    above = np.searchsorted(lines, block.steps.line, side="right") - 1
    return np.where(above >= 0, offsets[np.maximum(above, 0)], 0)


def _block(file: Path) -> Block | None:
    if file.suffix != ".block":
        return None
    try:
        return read_block(file)
    except BlockError as error:
        raise LedgerError(str(error)) from error


def _open_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        yield from stream


def _read_file(file: Path, clock: Clock) -> Iterator[Event]:
    parser = FileParser(file.name, clock)
    try:
        yield from parse_lines(_open_lines(file), parser.event, lambda number: _damaged(file, number))
    except FileNotFoundError:  # it became a block since the folder was listed
        block = _block(file.with_suffix(".block"))
        if block is None:
            raise
        for _, event in expand(block):
            yield parser.accept(event)


def parse_lines(
    lines: Iterator[bytes], parse: Callable[[bytes], Event], damaged: Callable[[int], Exception]
) -> Iterator[Event]:
    """Events of a file's lines. A cut line is allowed at the end of a file, and before a header."""
    bad: int | None = None
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            event = parse(line)
        except ValueError:
            if bad is not None:
                raise damaged(bad) from None
            bad = number
            continue
        if bad is not None and event["kind"] != "header":
            raise damaged(bad)
        bad = None
        yield event


def cut_lines_allowed(file: Path, lines: list[bytes]) -> None:
    """Raises LedgerError, as reading does, if the lines of a file hold damage that is more than a cut line."""
    parser = FileParser(file.name, Clock())
    for _ in parse_lines(iter(lines), parser.event, lambda number: _damaged(file, number)):
        pass


def _damaged(file: Path, number: int) -> LedgerError:
    return LedgerError(
        f"{file}:{number} is no event, and not the last line: the file was damaged after it was written; "
        "remove the line to read the rest"
    )
