"""Warm spares: processes that belong to no rank until a rank needs one. Every worker is started through here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ridethrough.launch.forker import Forker, Spare
from ridethrough.launch.memory import offer_to_killer

_REFILL_AFTER_S = 1.0  # a restart needs the processors first
_MOST_LOST = 5  # deaths of idle spares; then the node does without


class Reserve:
    """One node's. `record` takes ledger events. All methods run on the agent's event loop."""

    def __init__(
        self, forker: Forker, num_spares: int, preload: list[str], env: dict[str, str], record: Callable[..., None]
    ) -> None:
        self._forker = forker
        self._num_spares = num_spares
        self._preload, self._env = preload, env
        self._record = record
        self._idle: dict[Spare, int] = {}
        self._taking = asyncio.Event()
        self._starting: set[int] = set()
        self._num_lost = 0

    @property
    def pids(self) -> set[int]:
        """The processes that are waited for here."""
        return {spare.pid for spare in self._idle} | self._starting

    async def loop(self) -> None:
        """Keeps the reserve filled until cancelled; gives up when spares keep dying."""
        while self._num_lost < _MOST_LOST:
            self._taking.clear()
            while len(self._idle) < self._num_spares:
                try:
                    self._keep(await self._new())
                except OSError as error:
                    self._num_lost += 1
                    print(f"ridethrough: no warm spare: {error}", file=sys.stderr)
                    break
            await self._taking.wait()
            await asyncio.sleep(_REFILL_AFTER_S)

    async def start_worker(self, assignment: dict[str, Any], out: int, err: int) -> int:
        """The pid of a process that has taken the assignment: a spare's, or a new one's. Raises OSError if there is
        no spare, and none can be forked."""
        while self._idle:
            spare = next(iter(self._idle))
            self._let_go(spare)
            with contextlib.suppress(OSError):  # it has died just now
                return await self._assign(spare, assignment, out, err)
        if not await self._forker.ready():
            raise OSError(self._forker.note)
        return await self._assign(await self._forker.fork(), assignment, out, err)

    def stop(self) -> None:
        """The spares end."""
        for spare in list(self._idle):
            self._let_go(spare)
            spare.channel.close()

    async def _assign(self, spare: Spare, assignment: dict[str, Any], out: int, err: int) -> int:
        self._starting.add(spare.pid)
        try:
            await spare.assign(assignment, out, err)
        finally:
            self._starting.discard(spare.pid)
        return spare.pid

    async def _new(self) -> Spare:
        if await self._forker.ready():
            return await self._forker.fork()
        return self._execute()

    def _execute(self) -> Spare:
        """Imports for itself what the zygote would have: no thread or device that it finds there can do harm."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        argv = [sys.executable, "-m", "ridethrough.launch.spare", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(
                [*argv, *self._preload], pass_fds=[theirs.fileno()], env=self._env, stdin=subprocess.DEVNULL
            )
        process.returncode = 0  # waited for here, or by whoever it becomes a worker of
        return Spare(process.pid, ours)

    def _keep(self, spare: Spare) -> None:
        self._idle[spare] = pidfd = os.pidfd_open(spare.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._lost, spare)
        offer_to_killer(spare.pid)
        self._record("worker_spawn", worker=f"spare-{spare.pid}", pid=spare.pid, rank=None)

    def _let_go(self, spare: Spare) -> None:
        pidfd = self._idle.pop(spare)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._taking.set()

    def _lost(self, spare: Spare) -> None:
        """It held no rank, so nothing has ended with it."""
        self._num_lost += 1
        self._let_go(spare)
        spare.channel.close()
        _, status = os.waitpid(spare.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._record(
            "worker_exit",
            worker=f"spare-{spare.pid}",
            pid=spare.pid,
            rank=None,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
