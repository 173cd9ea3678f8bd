"""Keeps a long job's events small: closed segments of this host's processes become blocks, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

from ridethrough.launch import guard
from ridethrough.ledger.compact import has_closed
from ridethrough.ledger.rundir import RunDir

_LOOK_S = 30.0


async def keep_compact(run: RunDir, look_s: float = _LOOK_S) -> None:
    """Looks now and then, until cancelled. A segment takes seconds of a niced process, once in tens of thousands of
    steps; a failure is left to the next look, and to `ridethrough runs compact`."""
    host = socket.gethostname().replace("/", "_") or "host"
    argv = [sys.executable, "-m", "ridethrough.ledger.compact", str(run.path), host]
    while True:
        await asyncio.sleep(look_s)
        if not has_closed(run.path, host):
            continue
        quiet = subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                guard.command(os.getpid(), signal.SIGKILL, argv), stdin=quiet, stdout=quiet, stderr=quiet
            )
        except OSError:
            continue
        try:
            while process.poll() is None:
                await asyncio.sleep(0.5)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
