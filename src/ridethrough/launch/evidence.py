"""What an incident leaves for people: where each rank was, and the stacks of its threads, taken before anything is cut.

Kept in `incidents/<epoch>.<generation>/` of the run: `where-<node>.json` and, of a hang, `rank<r>.stacks.txt` and
torch's flight recorder, `flight_<r>`. A worker's `faulthandler` appends to a file in the agent's private folder; what
came since the last time belongs to the incident.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridethrough.generation.wire import encode
from ridethrough.health.heartbeat import STACK_SIGNAL
from ridethrough.launch import linux
from ridethrough.launch.workers import WorkerProcess

_WRITE_S = 0.3  # a process that is not stopped has written its stacks by then
_MOST_BYTES = 1 << 20


class Evidence:
    """One node's. All methods run on the agent's event loop; only reads pages and asks the workers for theirs."""

    def __init__(self, folder: Path, node: str, workers: Mapping[str, WorkerProcess]) -> None:
        self._folder = folder
        self._node = node
        self._workers = workers
        self._taken: set[int] = set()

    def take(self, epoch: int, generation: int, *, stacks: bool = False) -> None:
        """Notes where every worker of the generation is, once. `stacks`: asks for them and for the flight recorder too;
        only where the workers stand still: `faulthandler` reads the frames of threads that may be running (a worker in
        800 died of it)."""
        if generation in self._taken:
            return
        self._taken.add(generation)
        target = self._folder / f"{epoch}.{generation}"
        asked = []
        traces = []
        where: dict[str, Any] = {}
        for worker in self._workers.values():
            if worker.writer is None or worker.generation != generation or worker.pidfd < 0:
                continue
            where[str(worker.rank)] = _where(worker)
            if not stacks:
                continue
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(worker.pidfd, STACK_SIGNAL)
                asked.append((worker.rank, stacks_path(worker.page.path)))
            traces.append((worker.writer, str(target / f"flight_{worker.rank}")))
        if not where:
            return
        loop = asyncio.get_running_loop()
        if stacks:
            self._note(target, where)  # the workers write beside it
        else:
            loop.call_soon(self._note, target, where)  # the ranks are told to leave first
        for writer, path in traces:
            writer.write(encode({"t": "keep_trace", "generation": generation, "path": path}))
        loop.call_later(_WRITE_S, self._keep, target, asked)

    def _note(self, target: Path, where: dict[str, Any]) -> None:
        _write(target / f"where-{self._node}.json", json.dumps(where, indent=1).encode())

    def keep_now(self, worker: WorkerProcess, epoch: int) -> None:
        """The process is gone: its last words, if it had any, before its files are removed."""
        if worker.generation in self._taken:
            target = self._folder / f"{epoch}.{worker.generation}"
            self._keep(target, [(worker.rank, stacks_path(worker.page.path))])

    @staticmethod
    def _keep(target: Path, asked: list[tuple[int, Path]]) -> None:
        for rank, path in asked:
            try:
                with open(path, "rb+") as file:
                    text = file.read(_MOST_BYTES)
                    file.truncate(0)
            except OSError:
                continue
            if text:
                _write(target / f"rank{rank}.stacks.txt", text)


def stacks_path(heartbeat: Path) -> Path:
    """Where the worker with this heartbeat page has its stacks written."""
    return heartbeat.with_name(heartbeat.name.replace("heartbeat-", "stacks-", 1))


def _where(worker: WorkerProcess) -> dict[str, Any]:
    now_ns = time.monotonic_ns()
    reading = worker.reading()
    found = linux.stat(worker.pid)
    return {
        "pid": worker.pid,
        "step": reading.step,
        "phase": reading.phase,
        "in_phase_s": _ago_s(now_ns, reading.phase_ns),
        "in_step_s": _ago_s(now_ns, reading.step_ns),
        "collectives": {f"{key:x}": begun for key, begun in reading.groups},
        "python_ran_s_ago": _ago_s(now_ns, reading.gil_ns),
        "process_state": found.state if found is not None else "gone",
    }


def _ago_s(now_ns: int, then_ns: int) -> float | None:
    return round((now_ns - then_ns) / 1e9, 3) if then_ns else None


def _write(path: Path, text: bytes) -> None:
    """Without space there is no evidence; the recovery goes on."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
    except OSError as error:
        print(f"ridethrough: {path} is not written: {error.strerror}", file=sys.stderr, flush=True)
