"""Turns closed segments of events into blocks: `python -m ridethrough.ledger.compact RUN`, at any time, by anyone who
may write the run's folder.

A segment is closed when its process has begun the next one, or when nobody holds it open any more. Small ones stay
text. The block is written beside it and takes its place when it is on the disk, so that a reader always finds one of
the two, and a crash leaves both at worst (the block counts).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import BinaryIO

from ridethrough.ledger.blocks import make_block
from ridethrough.ledger.reading import LedgerError, cut_lines_allowed, segment
from ridethrough.ledger.rundir import write_private

SMALLEST_BYTES = 256 * 1024


def compact(run_dir: Path | str, *, host: str | None = None, smallest_bytes: int | None = None) -> list[Path]:
    """Make blocks of all closed segments (of one host's processes if given) of at least 256 KiB; returns them.

    A damaged segment stays as it is: reading names its damage. Raises OSError if the folder can't be written.
    """
    folder = Path(run_dir) / "events"
    files = sorted(folder.glob(f"{host}-*.jsonl" if host else "*.jsonl"), key=segment)
    last = dict(map(segment, files))
    least = SMALLEST_BYTES if smallest_bytes is None else smallest_bytes
    made = []
    for file in files:
        process, number = segment(file)
        with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:  # gone: another one was quicker
            big = os.fstat(stream.fileno()).st_size >= least
            if big and (number < last[process] or _released(stream)) and _compact(file, stream):
                made.append(file.with_suffix(".block"))
    return made


def has_closed(run_dir: Path | str, host: str) -> bool:
    """Is there a segment of the host's processes that its writer has left behind? Reads names only."""
    files = list((Path(run_dir) / "events").glob(f"{host}-*.jsonl"))
    processes = [segment(file)[0] for file in files]
    return len(processes) > len(set(processes))


def _compact(file: Path, stream: BinaryIO) -> bool:
    lines = stream.read().split(b"\n")
    try:
        cut_lines_allowed(file, lines)
    except LedgerError:
        return False
    block = file.with_suffix(".block")
    if not block.exists():
        write_private(block, make_block(lines))
    file.unlink()
    return True


def _released(stream: BinaryIO) -> bool:
    """Does no recorder write it? Each holds a shared lock; ours lasts until the stream is closed. Where the file
    system has no locks, nobody knows, and the last segment of a process stays text."""
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    os.nice(10)
    host = sys.argv[2] if len(sys.argv) > 2 else None
    print("\n".join(str(path) for path in compact(sys.argv[1], host=host)))
