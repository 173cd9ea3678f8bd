"""Runs a command of our own as a child and shows its run's progress, read from the ledger, while it lasts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from ridethrough.launch import guard
from ridethrough.launch.signals import PARENT_GONE
from ridethrough.report.progress import Progress
from ridethrough.report.tail import Follower

_POLL_S = 0.2
_PLAIN_EVERY_S = 5.0  # without a terminal, a line this often


def follow(argv: list[str], run_dir: Path, *, total: int, title: str, out: TextIO) -> int:
    """Starts `ridethrough ARGV`, prints a live line and each incident to `out`; returns the exit code.

    SIGINT and SIGTERM are passed on to the child, which ends in its own way; it ends with us in any case.
    """
    log = run_dir.parent / f"{run_dir.name}.log"
    with log.open("wb") as sink:
        child = subprocess.Popen(
            guard.command(os.getpid(), PARENT_GONE, [sys.executable, "-m", "ridethrough", *argv]),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with _signals_to(child):
            _show(child, Follower(run_dir), Progress(total), title, out)
    code = child.wait()
    text = log.read_text(errors="replace")
    log.unlink()
    if code != 0 and text:
        out.write(text)
    return code if code >= 0 else 128 - code


def _show(child: subprocess.Popen[bytes], follower: Follower, progress: Progress, title: str, out: TextIO) -> None:
    terminal = out.isatty()
    tick = threading.Event()
    since_line_s = 0.0
    clear = "\r\x1b[K" if terminal else ""
    ended = False
    while not ended:
        ended = child.poll() is not None
        for line in progress.update(follower.poll()):
            out.write(f"{clear}{title}: {line}\n")
        since_line_s += _POLL_S
        if terminal:
            out.write(f"{clear}{title}: {progress.line()}")
        elif since_line_s >= _PLAIN_EVERY_S or ended:
            since_line_s = 0.0
            out.write(f"{title}: {progress.line()}\n")
        out.flush()
        if not ended:
            tick.wait(_POLL_S)
    out.write("\n" if terminal else "")


@contextmanager
def _signals_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(signum: int, frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(signum)

    before = {sig: signal.signal(sig, forward) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
