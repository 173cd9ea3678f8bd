"""The agent's side of the zygote: starts it, has it fork processes, replaces it if it dies, does without if it must."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from ridethrough.generation.wire import Decoder, encode
from ridethrough.launch import guard

_FORK_LIMIT_S = 5.0
_ASSIGN_LIMIT_S = 5.0
_KILL_LIMIT_S = 5.0
_MOST_DEATHS = 3  # in a row, without a fork between


@dataclass(eq=False)
class Spare:
    """A process that waits at the other end of `channel` (see `spare`); it ends when that is closed."""

    pid: int
    channel: socket.socket

    async def assign(self, assignment: dict[str, Any], out: int, err: int) -> None:
        """Makes it a worker that runs `command` in `cwd` with `env`. Raises OSError if it is gone."""
        message = encode(assignment)
        with self.channel as channel:
            rest = message[socket.send_fds(channel, [message], [out, err]) :]
            if not rest:
                return  # it may have begun already, and closed its end
            try:
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(channel, rest), _ASSIGN_LIMIT_S)
            except asyncio.TimeoutError as error:
                raise OSError(f"process {self.pid} does not take its assignment") from error


class Forker:
    """Forks where that is safe (the zygote has one thread and no device open). All methods run on the agent's loop."""

    def __init__(self, *, job_mark: str, folder: str, preload: list[str], env: dict[str, str]) -> None:
        self._argv = [sys.executable, "-m", "ridethrough.launch.zygote"]
        self._more = [str(os.getpid()), job_mark, folder, *preload]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._decoder = Decoder()
        self._serials = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[bool] | None = None
        self._num_deaths = 0
        self._preload, self.note = preload, ""

    def start(self) -> None:
        """Begins the imports; `ready` tells when they are done."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._argv, str(theirs.fileno()), *self._more],
                pass_fds=[theirs.fileno()],
                env=self._env,
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._channel = ours
        self._decoder = Decoder()
        loop = asyncio.get_running_loop()
        if self._ready is None:
            self._ready = loop.create_future()
        loop.add_reader(ours, self._read)

    async def ready(self, limit_s: float = 300.0) -> bool:
        """True once processes can be forked; False if they must be executed (`note` says why)."""
        if self._ready is None:
            return False
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), limit_s)
        except asyncio.TimeoutError:
            self.note = f"the zygote was not ready after {limit_s:.0f} s"
            return False

    async def fork(self) -> Spare:
        """A new process. Raises OSError if there is none; a zygote that does not answer is replaced."""
        if self._channel is None:
            raise OSError("there is no zygote")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        serial = next(self._serials)
        answer = self._waiting[serial] = asyncio.get_running_loop().create_future()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(self._waiting.pop, serial, None)
            with theirs:
                socket.send_fds(self._channel, [encode({"fork": serial})], [theirs.fileno()])
            try:
                pid = await asyncio.wait_for(answer, _FORK_LIMIT_S)
            except asyncio.TimeoutError as error:
                self._replace(why := f"the zygote did not fork within {_FORK_LIMIT_S:.0f} s")
                raise OSError(why) from error
            undo.pop_all()
        self._num_deaths = 0
        return Spare(pid, ours)

    def execute(self, argv: list[str], env: dict[str, str], cwd: str, out: int, err: int) -> int:
        """A worker as a new process in a session of its own; returns its pid."""
        process = subprocess.Popen(
            guard.command(os.getpid(), signal.SIGKILL, argv),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        process.returncode = 0  # the agent itself waits for it
        return process.pid

    def stop(self) -> None:
        """Ends the zygote. At the end of its socket alone it would take the agent for dead, and end the job's
        processes."""
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(_KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                print(f"ridethrough: the zygote, process {self._process.pid}, cannot be killed", file=sys.stderr)
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def _read(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._replace("the zygote died")
            return
        for message in self._decoder.feed(data):
            if message.get("ready"):
                self._on_ready(message)
            else:
                answer = self._waiting.pop(message["fork"], None)
                if answer is None or answer.done():
                    continue
                if message["why"]:
                    answer.set_exception(OSError(message["why"]))
                else:
                    answer.set_result(message["pid"])

    def _on_ready(self, message: dict[str, Any]) -> None:
        reasons = [f"{name} cannot be imported ({why})" for name, why in message["failed"].items()]
        for name in message["failed"].keys() & set(self._preload):
            why = message["failed"][name]
            print(
                f"ridethrough: --preload {name} cannot be imported ({why}): workers start without it", file=sys.stderr
            )
        safe = message["num_threads"] == 1 and not message["devices"]
        if message["num_threads"] > 1:
            reasons.append(f"{message['num_threads']} threads after the import of {message['culprit']}")
        if message["devices"]:
            reasons.append(f"{', '.join(message['devices'])} open after the import of {message['culprit']}")
        self.note = "; ".join(reasons)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(safe)

    def _replace(self, why: str) -> None:
        self.stop()
        self._num_deaths += 1
        self.note = why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(OSError(why))
        self._waiting.clear()
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        if self._num_deaths < _MOST_DEATHS:
            print(f"ridethrough: {why}; starting another", file=sys.stderr)
            self.start()
        else:
            print(f"ridethrough: {why} {_MOST_DEATHS} times; workers are executed from now on", file=sys.stderr)
            self._ready.set_result(False)
