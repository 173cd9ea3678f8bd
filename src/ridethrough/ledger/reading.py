"""Reads a run's event files back into one list in the order of time, on one clock.

Files of one boot share the monotonic clock and are taken as they are. A file of another boot (the host was started
again, or it is another host) is shifted by the difference of wall and monotonic clock in the headers; that is the
only use of a wall clock here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_NS_FIELDS = ("t_ns", "t0_ns", "t1_ns", "fault_ns", "declared_ns", "all_out_ns")


class LedgerError(Exception):
    """Events that contradict themselves: a damaged file, or a partition that does not sum to the wall."""


def read_events(run_dir: Path | str) -> list[Event]:
    """All events of a run, sorted by `t_ns` (ties: by file, then by line).

    Each gets `host` and `role` from its file's header unless it has its own, and `file` (the file's name). A cut
    last line is left out. Raises LedgerError for damage elsewhere, naming file and line.
    """
    events: list[Event] = []
    clock = Clock()
    for file in event_files(run_dir):
        events.extend(_read_file(file, clock))
    return sorted(events, key=lambda event: event["t_ns"])


def event_files(run_dir: Path | str) -> list[Path]:
    """The event files there are now: launchers first (their boot gives the clock), then by name."""
    files = sorted((Path(run_dir) / "events").glob("*.jsonl"))
    order = ("-coordinator-", "-agent-")
    return sorted(files, key=lambda file: next((i for i, word in enumerate(order) if word in file.name), 9))


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
        self._clock = clock
        self._header: Event = {}
        self._offset_ns = 0

    def event(self, line: bytes) -> Event:
        """The event of one line. Raises ValueError if it is none (cut or damaged)."""
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(event.get("t_ns"), int) or "kind" not in event:
            raise ValueError("no event")
        if event["kind"] == "header":
            self._header = event
            self._offset_ns = self._clock.offset_ns(event)
        event.setdefault("host", self._header.get("host"))
        event.setdefault("role", self._header.get("role"))
        event["file"] = self.name
        return _shift(event, self._offset_ns) if self._offset_ns else event


def _shift(event: Event, offset_ns: int) -> Event:
    for name in _NS_FIELDS:
        if isinstance(event.get(name), int):
            event[name] += offset_ns
    if event.get("parts"):
        event["parts"] = [[state, a + offset_ns, b + offset_ns] for state, a, b in event["parts"]]
    return event


def _read_file(file: Path, clock: Clock) -> Iterator[Event]:
    parser = FileParser(file.name, clock)
    bad: int | None = None
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                event = parser.event(line)
            except ValueError:
                if bad is not None:
                    raise _damaged(file, bad) from None
                bad = number
                continue
            if bad is not None and event["kind"] != "header":  # a cut line ends a file or is followed by a header
                raise _damaged(file, bad)
            bad = None
            yield event


def _damaged(file: Path, number: int) -> LedgerError:
    return LedgerError(
        f"{file}:{number} is no event, and not the last line: the file was damaged after it was written; "
        "remove the line to read the rest"
    )
