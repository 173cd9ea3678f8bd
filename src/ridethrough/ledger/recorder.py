"""Appends events to the run's ledger: one file per process, one line per event, one write per line.

    recorder = Recorder(Path("runs/a"), "worker")
    recorder.emit("enter", generation=0, rank=3)

A line is in the page cache when `emit` returns, so it survives a SIGKILL of the process (not a power cut of
the host). Times are `time.monotonic_ns()` of the host; the header ties them to the wall clock, once per file.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ridethrough.ledger.schema import SCHEMA
from ridethrough.version import __version__

SEGMENT_BYTES = 8 << 20  # then the next file begins, and this one may become a block
ROLES = ("agent", "coordinator", "worker", "keeper", "cli")


class Recorder:
    """The writing end of one process's event files, `events/<host>-<role>-<pid>.jsonl` (mode 0600), and after every
    8 MiB the next segment, `.1.jsonl`, `.2.jsonl` ...

    `run_dir` None makes every call a no-op. Make it in the process that writes (after a fork, not before).
    `emit` may be called from any thread. A write that fails (full disk) never disturbs training: it is
    reported once on standard error, the events are counted, and the count stands in the header that the next
    success writes. Raises OSError only when the file cannot be made.
    """

    def __init__(self, run_dir: Path | None, role: str) -> None:
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")
        self.role = role
        self.path: Path | None = None
        self.num_dropped = 0  # events lost to failing writes since the last header
        self._encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
        self._lock = threading.Lock()
        self._fd = -1
        self._torn = False
        self._size = self._segment = 0
        if run_dir is None:
            return
        folder = Path(run_dir) / "events"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        host = socket.gethostname().replace("/", "_") or "host"
        self._process = folder / f"{host}-{role}-{os.getpid()}"
        self._open(self._first_free())

    def _first_free(self) -> int:
        """The segment to write to: 0, or the last one of a process that had this id before."""
        name = self._process.name
        last = 0
        for file in self._process.parent.glob(f"{name}.*"):
            number = file.name[len(name) + 1 :].split(".")[0]
            last = max(last, (int(number) if number.isdigit() else 0) + (file.suffix == ".block"))
        return last

    def _open(self, number: int) -> None:
        """Begin (or go on with) a segment, and close the one before. Raises OSError; then nothing has changed."""
        path = self._process.with_name(self._process.name + (f".{number}.jsonl" if number else ".jsonl"))
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # says that it is being written
        except BlockingIOError:  # it is just being made a block
            os.close(fd)
            self._open(number + 1)
            return
        except OSError:
            pass  # a file system without locks
        if self._fd >= 0:
            os.close(self._fd)
        self.path, self._fd, self._segment = path, fd, number
        self._size = os.fstat(fd).st_size
        self._torn = self._size > 0  # a process id used again: never glue to a cut line
        if not self._torn:
            self._write(self._header())

    def emit(self, kind: str, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one event. `t_ns`: when it happened (monotonic ns of this host), now if None.

        Costs one JSON encoding and one write, a few microseconds. Values that JSON lacks become numbers
        (anything with `.item()`, which for a tensor on a device waits for it) or text. Never raises for a
        failing disk.
        """
        if self._fd < 0:
            return
        event = {"t_ns": time.monotonic_ns() if t_ns is None else t_ns, "kind": kind, **fields}
        line = (self._encode(event) + "\n").encode()
        with self._lock:
            if self._fd >= 0 and (not self._torn or self._mend()) and not self._write(line):
                self.num_dropped += 1
            if self._size >= SEGMENT_BYTES and not self._torn:
                self._next_segment()

    def close(self) -> None:
        """Close the file; later calls of `emit` do nothing. May be called twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_segment(self) -> None:
        try:
            self._open(self._segment + 1)
        except OSError:
            self._size = 0  # this one goes on; tried again later

    def _header(self) -> bytes:
        mono, wall = time.monotonic_ns(), time.time_ns()
        header = {
            "t_ns": mono,
            "kind": "header",
            "schema": SCHEMA,
            "role": self.role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "mono_ns": mono,
            "wall_ns": wall,
            "version": __version__,
        }
        if self.num_dropped:
            header["num_dropped"] = self.num_dropped
        return (self._encode(header) + "\n").encode()

    def _mend(self) -> bool:
        """After a cut line: end it and write a header anew, so that readers know the cut is no damage."""
        if not self._write(b"\n" + self._header()):
            self.num_dropped += 1
            return False
        self._torn = False
        self.num_dropped = 0
        return True

    def _write(self, line: bytes) -> bool:
        try:
            written = os.write(self._fd, line)
            reason = "short write"
        except OSError as error:
            written, reason = 0, str(error)
        if written == len(line):
            self._size += written
            return True
        if not self.num_dropped:
            print(f"ridethrough: events of {self.path} are being lost: {reason}", file=sys.stderr, flush=True)
        self._torn = True
        return False


def boot_id() -> str:
    """The kernel's id of this boot: processes that share it share the monotonic clock. Else the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
    return str(value)
