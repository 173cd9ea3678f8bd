"""The worker's monitor thread: hears the agent, ends the generation for the main thread, stamps the heartbeat."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.restart import flight_recorder
from ridethrough.restart.generation import Stage
from ridethrough.restart.groups import Groups
from ridethrough.restart.interrupt import Interrupter
from ridethrough.restart.link import Link

_CUT_MARGIN_S = 2.0  # beyond the limit of NCCL's abort
_BEAT_S = 0.1
_INTERRUPT_EVERY_S = 0.05


class Monitor:
    """A daemon thread, started by `rt.run` and living as long as the process. It touches the link, the heartbeat page,
    the generation's stage and its groups' sockets; never a tensor."""

    def __init__(self, link: Link, page: HeartbeatPage, interrupter: Interrupter) -> None:
        self._link = link
        self._page = page
        self._interrupter = interrupter
        self._stage: Stage | None = None
        self._groups: Groups | None = None
        self._cut_at: float | None = None
        self._policy = Policy()
        self._lock = threading.Lock()
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="ridethrough-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, stage: Stage, groups: Groups, policy: Policy) -> None:
        """Main thread, before it enters a generation."""
        with self._lock:
            self._policy = policy
            self._stage, self._groups, self._cut_at = stage, groups, None

    def cut(self, stage: Stage) -> None:
        """Any thread: ends the generation on this rank; its peers see their connections close. Returns when that is
        done, whoever does it: groups that are destroyed while NCCL aborts them corrupt the heap."""
        with self._lock:
            mine = stage is self._stage and not stage.over
            if mine:
                stage.end()
                self._cut_at = time.monotonic()
            groups = self._groups
        if not mine:
            stage.cut.wait(_CUT_MARGIN_S + (groups.abort_limit_s if groups is not None else 0.0))
            return
        try:
            if groups is not None:
                groups.cut()
        finally:
            stage.cut.set()

    def _run(self) -> None:
        while True:
            leaving = self._cut_at is not None and self._stage is not None and not self._stage.left.is_set()
            messages = self._link.receive(_INTERRUPT_EVERY_S if leaving else _BEAT_S)
            if messages is None:
                # Without its agent a worker is nobody's: a launcher that is gone cannot end or restart it.
                print("ridethrough: the node's agent is gone; this worker ends", file=sys.stderr)
                os._exit(70)
            for message in messages:
                self._hear(message)
            self._beat()
            if leaving:
                self._push()

    def _hear(self, message: dict[str, Any]) -> None:
        kind, stage = message["t"], self._stage
        if kind in ("plan", "done", "refused"):
            self.inbox.put(message)
        elif stage is None or message.get("generation") != stage.generation:
            return
        elif kind == "leave":
            self.cut(stage)
            self.inbox.put(message)
        elif kind == "ask_step":
            self._link.send({"t": "step_at", "generation": stage.generation, "step": stage.ask()})
        elif kind == "stop_at":
            stage.stop_at(message["step"])
        elif kind == "keep_trace":
            flight_recorder.keep(Path(message["path"]))

    def _beat(self) -> None:
        self._page.stamp("gil_ns", time.monotonic_ns())
        groups = self._groups
        if groups is not None and self._cut_at is None:
            self._page.collectives(groups.collectives())

    def _push(self) -> None:
        """The main thread has not left by itself: cut what it may still wait for and interrupt it, again and again; the
        agent ends what does not help."""
        groups = self._groups
        if groups is not None:
            groups.cut_connections()
        if self._cut_at is not None and time.monotonic() - self._cut_at >= self._policy.interrupt_after_s:
            self._interrupter.fire()
