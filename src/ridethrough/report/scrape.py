"""The metrics of all runs below a root that live, or ended a moment ago: what `/metrics` answers."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from ridethrough.ledger.reading import LedgerError, event_files
from ridethrough.ledger.rundir import RunDir, RunDirError
from ridethrough.ledger.summary import read_run
from ridethrough.report.index import run_folders
from ridethrough.report.live import life
from ridethrough.report.metrics import NOTHING, Counts, counts, exposition
from ridethrough.report.status import Status, read_status, status_of

_SHOWN_S = 60.0  # after its end a run's series stay so long, so that the last scrape sees how it ended


class Scraper:
    """Answers scrapes; reads a run that has ended only once. Not for several threads at once."""

    def __init__(self, root: Path, only: Path | None = None) -> None:
        """`only`: one run; else all below `root`."""
        self._root, self._only = root, only
        self._ended: dict[Path, tuple[Status, Counts]] = {}

    def scrape(self) -> str:
        """The text of now. Runs that can't be read have no series."""
        found: list[tuple[Status, Counts]] = []
        for path in [self._only] if self._only is not None else run_folders(self._root):
            try:
                alive = life(path)
                if not alive.running and not _ended_lately(path):
                    self._ended.pop(path, None)
                elif not alive.running:
                    if path not in self._ended:
                        self._ended[path] = _read(path, None, False)
                    found.append(self._ended[path])
                else:
                    found.append(_read(path, alive.end_ns, True))
            except (RunDirError, LedgerError, OSError):
                continue
        return exposition(found)


def _read(path: Path, end_ns: int | None, running: bool) -> tuple[Status, Counts]:
    try:
        ledger = read_run(path, end_ns)
    except LedgerError:
        return read_status(path), NOTHING  # just begun; if it is damaged this raises too
    return status_of(ledger, running=running), counts(ledger.past, ledger.incidents)


def _ended_lately(path: Path) -> bool:
    """By its result, or for a run that died by the last word of it."""
    result = RunDir.open(path).run_json()["result"]
    if result is not None:
        ended_s = datetime.datetime.fromisoformat(result["ended"]).timestamp()
    else:
        ended_s = max((file.stat().st_mtime for file in event_files(path)), default=0.0)
    return time.time() - ended_s < _SHOWN_S
