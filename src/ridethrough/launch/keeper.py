"""The agent's hold on the node's keeper: started with it, started again when it dies, ended after the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ridethrough.launch import guard
from ridethrough.launch.environment import without_token
from ridethrough.ledger.rundir import RunDir

_RESTARTS = 5
_KILL_AFTER_S = 5.0  # behind the grace, which the keeper keeps by itself


class KeeperProcess:
    """The background writer of checkpoints. It ends by itself when it gets SIGTERM, after the writes in flight."""

    def __init__(
        self,
        path: Path,
        run: RunDir,
        *,
        grace_s: float,
        env: Mapping[str, str],
        address: str = "",
        token: str = "",
        replicas: int = 1,
        rate: float = 0.0,
    ) -> None:
        """`grace_s`: how long it may write once it is told to stop. `address`: where keepers of other nodes reach this
        one; they prove that they know `token`. `env` comes on top of the launcher's own environment, which it
        gets without the token."""
        self._token, self._grace_s = token, grace_s
        self._env = {**without_token(), **env}
        self._argv = [sys.executable, "-m", "ridethrough.checkpoint.keeper", "--socket", str(path)]
        self._argv += ["--run-dir", str(run.path), "--grace", str(grace_s)]
        if address:
            self._argv += ["--address", address, "--replicas", str(replicas), "--replica-rate", str(rate)]
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._watcher = asyncio.ensure_future(self._supervise())

    def flush(self) -> None:
        """Has it write the newest state that only memory holds; the ranks need not be able to do anything."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    async def stop(self, again: asyncio.Event | None = None) -> None:
        """Lets it finish its writes; kills it when its grace has long been over, or as soon as `again` is set."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is None or self._process.poll() is not None:
            return
        pidfd = os.pidfd_open(self._process.pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        waits = [asyncio.ensure_future(event.wait()) for event in (ended, again or asyncio.Event())]
        try:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait(waits, timeout=self._grace_s + _KILL_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            for wait in waits:
                wait.cancel()
        if not ended.is_set():
            print("ridethrough: the keeper is killed before it has finished its writes", file=sys.stderr)
            self._process.kill()
        self._process.wait()

    async def _supervise(self) -> None:
        for left in reversed(range(_RESTARTS + 1)):
            argv = guard.command(os.getpid(), signal.SIGTERM, self._argv)
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, env=self._env)
            assert self._process.stdin is not None
            with contextlib.suppress(OSError), self._process.stdin as stdin:
                stdin.write(f"{self._token}\n".encode())  # never in its environment or command line
            pidfd = os.pidfd_open(self._process.pid)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
            then = "it is started again" if left else "the next one is left to the ranks to start"
            print(f"ridethrough: the keeper ended with {self._process.wait()}; {then}", file=sys.stderr)
