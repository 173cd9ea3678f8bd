"""The agent's side of the zygote: starts it, asks it for workers, replaces it if it dies, does without if it must."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from ridethrough.generation.wire import Decoder, encode
from ridethrough.launch import guard


class Forker:
    """Starts worker processes; all methods run on the agent's event loop.

    Forks where that is safe (the zygote has one thread and no device open); else, and for programs that are not
    Python, each worker is a new interpreter.
    """

    def __init__(self, *, job_mark: str, folder: str, preload: list[str], env: dict[str, str]) -> None:
        self._job_mark, self._folder, self._preload, self._env = job_mark, folder, preload, env
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._decoder = Decoder()
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[bool] | None = None
        self.note = ""

    def start(self) -> None:
        """Begins the imports; `ready` tells when they are done."""
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "ridethrough.launch.zygote", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*argv, self._job_mark, self._folder, *self._preload],
            pass_fds=[theirs.fileno()],
            env=self._env,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._decoder = Decoder()
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours, self._read)

    async def ready(self, limit_s: float = 300.0) -> bool:
        """True once workers can be forked; False if they must be executed (`note` says why)."""
        if self._ready is None:
            return False
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), limit_s)
        except asyncio.TimeoutError:
            self.note = f"the zygote was not ready after {limit_s:.0f} s"
            return False

    async def fork(self, worker: str, command: list[str], env: dict[str, str], cwd: str, out: int, err: int) -> int:
        """A worker forked from the zygote; returns its pid. Raises OSError if the zygote is gone."""
        if self._channel is None:
            raise OSError("the zygote is gone")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[worker] = future
        request = encode({"worker": worker, "command": command, "env": env, "cwd": cwd})
        sent = socket.send_fds(self._channel, [request], [out, err])
        while sent < len(request):
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError):
                sent += self._channel.send(request[sent:])
        return await asyncio.wait_for(future, 30.0)

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
        """Ends the zygote; it ends what the job left behind."""
        self._close()
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

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
            self._lost()
            return
        for message in self._decoder.feed(data):
            if message.get("ready"):
                self._on_ready(message)
            else:
                future = self._waiting.pop(message["worker"], None)
                if future is not None and not future.done():
                    future.set_result(message["pid"])

    def _on_ready(self, message: dict[str, Any]) -> None:
        reasons = [f"{name} cannot be imported ({why})" for name, why in message["failed"].items()]
        safe = message["num_threads"] == 1 and not message["devices"]
        if message["num_threads"] > 1:
            reasons.append(f"{message['num_threads']} threads after the import of {message['culprit']}")
        if message["devices"]:
            reasons.append(f"{', '.join(message['devices'])} open after the import of {message['culprit']}")
        self.note = "; ".join(reasons)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(safe)

    def _lost(self) -> None:
        self._close()
        if self._process is not None:
            self._process.poll()
        self.note = "the zygote died"
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(False)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(OSError("the zygote died"))
        self._waiting.clear()

    def _close(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
