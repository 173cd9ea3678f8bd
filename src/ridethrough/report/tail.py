"""Follows a run that is under way: only what is new is read, whatever process writes it.

follower = Follower(run_dir)
while ...: events = follower.poll()
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ridethrough.ledger.blocks import BlockError, expand, read_block
from ridethrough.ledger.reading import Clock, Event, FileParser, event_files


class Follower:
    """Reads the events that were appended since the last poll. One reader's state; not for several threads.

    The folder need not exist yet. Lines that are not complete are kept until they are; a line that is damaged is
    left out (offline reading names it). A file that has become a block goes on where its text was left.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        self._clock = Clock()
        self._parsers: dict[Path, FileParser] = {}  # by the file's name without its suffix
        self._offsets: dict[Path, int] = {}
        self._num_lines: dict[Path, int] = {}
        self._blocks: set[Path] = set()

    def poll(self) -> list[Event]:
        """The new events of all files, sorted by `t_ns`; empty if there are none. Never waits."""
        events: list[Event] = []
        for file in event_files(self._run_dir):
            name = file.with_suffix("")
            parser = self._parsers.setdefault(name, FileParser(file.name, self._clock))
            if file.suffix == ".block":
                if name not in self._blocks:
                    self._blocks.add(name)
                    events += self._rest_of_block(file, parser)
                continue
            for line in self._new_lines(file):
                try:
                    events.append(parser.event(line))
                except ValueError:
                    continue  # a cut line; what follows it is a header
        return sorted(events, key=lambda event: event["t_ns"])

    def _rest_of_block(self, file: Path, parser: FileParser) -> Iterator[Event]:
        known = self._num_lines.get(file.with_suffix(""), 0)
        try:
            block = read_block(file)
        except (BlockError, OSError):
            return
        for number, event in expand(block):
            if number >= known:
                yield parser.accept(event)

    def _new_lines(self, file: Path) -> list[bytes]:
        name = file.with_suffix("")
        offset = self._offsets.get(name, 0)
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
        except FileNotFoundError:
            return []  # it has just become a block: the next poll reads that
        end = data.rfind(b"\n") + 1
        self._offsets[name] = offset + end
        lines = data[:end].split(b"\n")[:-1] if end else []
        self._num_lines[name] = self._num_lines.get(name, 0) + len(lines)
        return [line for line in lines if line.strip()]
