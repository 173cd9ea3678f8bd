"""The agent's hold on the node's keeper: started with it, started again when it dies, ended after the workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from ridethrough.launch import guard
from ridethrough.ledger.rundir import RunDir

_RESTARTS = 5
_STOP_LIMIT_S = 60.0


class KeeperProcess:
    """The background writer of checkpoints. It ends by itself when it gets SIGTERM, after the writes in flight."""

    def __init__(self, path: Path, run: RunDir) -> None:
        self._argv = [sys.executable, "-m", "ridethrough.checkpoint.keeper", "--socket", str(path)]
        self._argv += ["--run-dir", str(run.path)]
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._starts = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._watcher = asyncio.ensure_future(self._supervise())

    async def stop(self) -> None:
        """Lets it finish its writes; kills it after a minute."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait, _STOP_LIMIT_S), _STOP_LIMIT_S + 5)
        except (subprocess.TimeoutExpired, asyncio.TimeoutError):
            print("ridethrough: the keeper did not finish its writes in time; it is killed", file=sys.stderr)
            self._process.kill()
            self._process.wait()

    async def _supervise(self) -> None:
        while self._starts <= _RESTARTS:
            self._starts += 1
            argv = guard.command(os.getpid(), signal.SIGTERM, self._argv)
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
            pidfd = os.pidfd_open(self._process.pid)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
            print(f"ridethrough: the keeper ended with {self._process.wait()}; it is started again", file=sys.stderr)
