"""Looks at the node's heartbeat pages several times a second: progress for the machine, hangs for the judge."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ridethrough.generation import messages as m
from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import STACK_SIGNAL, Reading
from ridethrough.health.judge import Judge, Verdict
from ridethrough.launch.workers import WorkerProcess

_PERIOD_S = 0.1
_SUSPECT_AGAIN_S = 1.0  # nobody was guilty (a peer was saving, say): ask again after this time


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
        self._suspected_s = 0.0

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
        if verdict is not None and time.monotonic() - self._suspected_s > _SUSPECT_AGAIN_S:
            self._suspected_s = time.monotonic()
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

    def situations(self) -> dict[int, m.Situation]:
        """Where the node's ranks are, for the coordinator's inquest."""
        now_ns = time.monotonic_ns()
        found = {}
        for worker in self._workers.values():
            if worker.pidfd < 0 or worker.writer is None:
                continue
            reading = worker.reading()
            if reading.generation != self._generation:
                continue
            found[worker.rank] = m.Situation(
                worker=worker.id,
                pid=worker.pid,
                phase=reading.phase,
                step=reading.step,
                collectives=reading.collectives,
                within_cap=self.judge.within_cap(now_ns, reading),
                since_ns=max(reading.step_ns, reading.phase_ns),
            )
        return found

    def _report_hang(self, verdict: Verdict) -> None:
        situations = self.situations()
        for rank in verdict.guilty:
            if rank in situations:  # its own cap is over, whatever the phase
                situations[rank] = situations[rank].model_copy(update={"within_cap": False})
        self._report(
            m.HangSuspected(
                node=self._node,
                generation=self._generation,
                age_s=verdict.age_s,
                deadline_s=verdict.deadline_s,
                situations=situations,
            )
        )
