"""The Unix socket that the node's workers speak to: what they say becomes events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation import peer
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.membership import WorkerState
from ridethrough.generation.wire import Decoder, WireError, encode
from ridethrough.launch.watch import Watch
from ridethrough.launch.workers import WorkerProcess

_STATE_AFTER: dict[str, WorkerState] = {"ready": "ready", "entered": "inside", "finished": "finished"}


class WorkerLink:
    """`report` takes the events, `replace(worker, why)` ends a worker that asks for it. One event loop, one thread."""

    def __init__(
        self,
        node: str,
        workers: Mapping[str, WorkerProcess],
        watch: Watch,
        report: Callable[[m.Event], None],
        replace: Callable[[WorkerProcess, str], None],
    ) -> None:
        self._node, self._workers, self._watch = node, workers, watch
        self._report, self._replace = report, replace
        self._server: asyncio.Server | None = None

    async def open(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)
        os.chmod(path, 0o600)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def send(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Nothing happens if the worker is not connected: its end comes as an event of its own."""
        if worker.writer is not None:
            worker.writer.write(encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's connection: only processes of our own user are heard."""
        ours = peer.is_ours(writer.get_extra_info("socket"))
        decoder = Decoder()
        worker: WorkerProcess | None = None
        try:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it died: its pidfd tells
                while ours and (data := await reader.read(1 << 16)):
                    for message in decoder.feed(data):
                        if message.get("t") == "hello":
                            worker = self._hello(message, writer)
                            if worker is None:
                                return
                        elif worker is not None:
                            self._hear(worker, message)
        except (WireError, KeyError, ValueError) as error:
            print(f"ridethrough: a worker's connection is closed, it sent nonsense: {error!r}", file=sys.stderr)
        finally:
            if worker is not None and worker.writer is writer:
                worker.writer = None
            writer.close()

    def _hello(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> WorkerProcess | None:
        worker = self._workers.get(message["worker"])
        if message.get("protocol") != m.PROTOCOL:
            why = f"the worker speaks protocol {message.get('protocol')}, its agent {m.PROTOCOL}: install one version"
            writer.write(encode({"t": "refused", "why": why}))
            return None
        if worker is not None:
            worker.writer = writer
        return worker

    def _hear(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        self._watch.flush()
        kind = message["t"]
        worker.state = _STATE_AFTER.get(kind, worker.state)
        if kind == "ready":
            self._watch.left(worker.rank, message.get("left_by", ""))
            self._report(
                m.WorkerReady(worker=worker.id, left=message["generation"], inventory=message.get("inventory", {}))
            )
        elif kind == "entered":
            self._report(m.WorkerEntered(worker=worker.id, generation=message["generation"]))
        elif kind == "replace":
            if message["node"]:
                self._report(m.NodeUnfit(node=self._node, generation=worker.generation, why=message["why"]))
            self._replace(worker, message["why"])
        elif kind == "fault":
            fields = {**message["report"], "worker": worker.id, "node": self._node, "pid": worker.pid}
            report = FaultReport.model_validate({**fields, "declared_ns": time.monotonic_ns()})
            self._report(m.WorkerFaulted(report=report))
        elif kind == "finished":
            self._report(
                m.WorkerFinished(
                    worker=worker.id,
                    generation=message["generation"],
                    step=message.get("step", 0),
                    stopped=message.get("stopped", False),
                )
            )
        elif kind == "step_at":
            self._report(m.StepAt(worker=worker.id, generation=message["generation"], step=message["step"]))
