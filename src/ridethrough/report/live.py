"""Is a run under way, and what time is it on its clock? Needed for figures of a job that has not ended."""

from __future__ import annotations

import fcntl
import time
from dataclasses import dataclass
from pathlib import Path

from ridethrough.ledger.reading import Event, LedgerError, event_files
from ridethrough.ledger.recorder import boot_id
from ridethrough.ledger.rundir import RunDir

_SILENT_S = 600.0  # a run of another host that said nothing for so long has probably died


@dataclass(frozen=True)
class Life:
    """`running`: some process of it lives (on another host: it spoke lately). `end_ns`: until when to count, for
    `read_run`; None for a run that is over."""

    running: bool
    end_ns: int | None


def life(run_dir: Path) -> Life:
    """Raises RunDirError when there is no run. Reads run.json, the first line of a file, and locks."""
    if RunDir.open(run_dir).run_json()["result"] is not None:
        return Life(False, None)
    files = event_files(run_dir)
    header = next((h for file in files if (h := _header(file)) is not None), None)
    if header is None:
        return Life(True, None)  # just begun
    if header["boot_id"] == boot_id():
        held = any(_held(file) for file in files if file.suffix == ".jsonl")
        return Life(held, time.monotonic_ns() if held else None)
    newest_s = max(file.stat().st_mtime for file in files)
    running = time.time() - newest_s < _SILENT_S
    return Life(running, header["mono_ns"] + time.time_ns() - header["wall_ns"] if running else None)


def _header(file: Path) -> Event | None:
    import json

    if file.suffix == ".block":
        return None
    with file.open("rb") as stream:
        try:
            event = json.loads(stream.readline())
        except ValueError:
            return None
    return event if isinstance(event, dict) and event.get("kind") == "header" else None


def _held(file: Path) -> bool:
    """Does a recorder hold it open? Each holds a shared lock."""
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


__all__ = ["LedgerError", "Life", "life"]
