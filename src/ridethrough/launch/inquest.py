"""A suspected hang: asks every node where its ranks are, then names the guilty ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.plan import Plan
from ridethrough.health.conviction import convict

_ANSWER_LIMIT_S = 0.5


class Inquest:
    """At most one at a time; `report` takes the verdict as fault reports. One event loop, one thread."""

    def __init__(self, ask: Callable[[m.Inspect], None], report: Callable[[FaultReport], None]) -> None:
        self._ask, self._report = ask, report
        self._suspicion: m.HangSuspected | None = None
        self._plan: Plan | None = None
        self._situations: dict[int, m.Situation] = {}
        self._missing: set[str] = set()
        self._limit: asyncio.TimerHandle | None = None

    def open(self, suspicion: m.HangSuspected, plan: Plan) -> None:
        """Nodes that do not answer in time are judged by those who do: their lease is another's business."""
        if self._suspicion is not None or suspicion.generation != plan.generation:
            return
        self._suspicion, self._plan = suspicion, plan
        self._situations = dict(suspicion.situations)
        self._missing = {n.node for n in plan.nodes} - {suspicion.node}
        self._limit = asyncio.get_running_loop().call_later(_ANSWER_LIMIT_S, self._close)
        for node in self._missing:
            self._ask(m.Inspect(node=node, generation=plan.generation))
        self._close_if_complete()

    def answer(self, event: m.Inspected) -> None:
        if self._suspicion is None or event.generation != self._suspicion.generation:
            return
        self._situations.update(event.situations)
        self._missing.discard(event.node)
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if not self._missing:
            self._close()

    def _close(self) -> None:
        suspicion, plan = self._suspicion, self._plan
        if self._limit is not None:
            self._limit.cancel()
        self._suspicion = None
        if suspicion is None or plan is None:
            return
        nodes = {rank: node for rank, _, node, _ in plan.members()}
        for rank in convict(self._situations):
            found = self._situations[rank]
            self._report(
                FaultReport(
                    generation=suspicion.generation,
                    worker=found.worker,
                    rank=rank,
                    node=nodes.get(rank, ""),
                    pid=found.pid,
                    fault_class="hang",
                    detected_by="heartbeat",
                    phase=found.phase,
                    step=found.step,
                    cause=(
                        f"no progress for {suspicion.age_s:.1f} s in phase {found.phase} of step {found.step} "
                        f"(limit {suspicion.deadline_s:.1f} s)"
                    ),
                    declared_ns=time.monotonic_ns(),
                    fault_ns=found.since_ns,
                    details={"deadline_s": suspicion.deadline_s, "age_s": suspicion.age_s},
                )
            )
