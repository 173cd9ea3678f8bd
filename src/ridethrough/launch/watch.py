"""Looks at the node's heartbeat pages several times a second: progress for the machine, hangs for the judge."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import STACK_SIGNAL, Reading
from ridethrough.health.judge import Judge, Verdict
from ridethrough.launch.workers import WorkerProcess

_PERIOD_S = 0.1


class Watch:
    """Reads pages only; never touches a worker but to ask for its stacks."""

    def __init__(
        self,
        policy: Policy,
        node: str,
        workers: Mapping[str, WorkerProcess],
        report: Callable[[m.Event], None],
    ) -> None:
        self._node = node
        self._workers = workers
        self._report = report
        self.judge = Judge(policy)
        self._generation = 0
        self._told_step = 0
        self._convicted = 0

    def generation_begins(self, generation: int) -> None:
        self._generation = generation
        self._told_step = 0

    async def loop(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.flush()
            self.look()

    def flush(self) -> None:
        """Tells the machine of finished steps, so that it knows them before it hears of a fault behind them."""
        best = 0
        for reading in self._readings().values():
            if reading.generation == self._generation and reading.last_step_ns:
                best = max(best, reading.step - 1)
        if best > self._told_step:
            self._told_step = best
            self._report(m.Progress(node=self._node, generation=self._generation, step=best))

    def look(self) -> None:
        verdict = self.judge.look(time.monotonic_ns(), self._readings())
        if verdict is not None and self._convicted != self._generation:
            self._convicted = self._generation
            self._report_hang(verdict)

    def dump_stacks(self, folder: Path, generation: int) -> None:
        """Asks every worker that can for the stacks of its threads; they go to the file it named at its start."""
        for worker in self._workers.values():
            if worker.writer is not None and worker.generation == generation and worker.pidfd >= 0:
                try:
                    signal.pidfd_send_signal(worker.pidfd, STACK_SIGNAL)
                except OSError:
                    continue

    def _readings(self) -> dict[int, Reading]:
        return {w.rank: w.reading() for w in self._workers.values() if w.pidfd >= 0 and w.writer is not None}

    def _report_hang(self, verdict: Verdict) -> None:
        for rank in verdict.guilty:
            worker = next(w for w in self._workers.values() if w.rank == rank)
            reading = worker.reading()
            cause = (
                f"no progress for {verdict.age_s:.1f} s in phase {verdict.phase} of step {verdict.step} "
                f"(limit {verdict.deadline_s:.1f} s)"
            )
            self._report(
                m.WorkerFaulted(
                    report=FaultReport(
                        generation=self._generation,
                        worker=worker.id,
                        rank=rank,
                        node=self._node,
                        pid=worker.pid,
                        fault_class="hang",
                        detected_by="heartbeat",
                        phase=verdict.phase,
                        step=verdict.step,
                        cause=cause,
                        declared_ns=time.monotonic_ns(),
                        fault_ns=max(reading.step_ns, reading.phase_ns),
                        details={"deadline_s": verdict.deadline_s, "age_s": verdict.age_s},
                    )
                )
            )
