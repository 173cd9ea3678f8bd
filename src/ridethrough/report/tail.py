"""Follows a run that is under way: only what is new is read, whatever process writes it.

follower = Follower(run_dir)
while ...: events = follower.poll()
"""

from __future__ import annotations

from pathlib import Path

from ridethrough.ledger.reading import Clock, Event, FileParser, event_files


class Follower:
    """Reads the events that were appended since the last poll. One reader's state; not for several threads.

    The folder need not exist yet. Lines that are not complete are kept until they are; a line that is damaged is
    left out (offline reading names it).
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        self._clock = Clock()
        self._parsers: dict[Path, FileParser] = {}
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """The new events of all files, sorted by `t_ns`; empty if there are none. Never waits."""
        events: list[Event] = []
        for file in event_files(self._run_dir):
            parser = self._parsers.setdefault(file, FileParser(file.name, self._clock))
            for line in self._new_lines(file):
                try:
                    events.append(parser.event(line))
                except ValueError:
                    continue  # a cut line; what follows it is a header
        return sorted(events, key=lambda event: event["t_ns"])

    def _new_lines(self, file: Path) -> list[bytes]:
        offset = self._offsets.get(file, 0)
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        self._offsets[file] = offset + end
        return [line for line in data[:end].splitlines() if line.strip()]
