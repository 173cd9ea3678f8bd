"""Looks at the node's heartbeat pages several times a second: progress for the machine, hangs for the judge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ridethrough.generation import messages as m
from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import Reading
from ridethrough.health.judge import Judge, Verdict
from ridethrough.launch import linux
from ridethrough.launch.workers import WorkerProcess

_PERIOD_S = 0.1
_STACKS_S = 0.05
_SUSPECT_AGAIN_S = 1.0  # nobody was guilty (a peer was saving, say): ask again after this time


class Watch:
    """Reads pages only; never touches a worker but to ask for its stacks."""

    def __init__(
        self,
        policy: Policy,
        node: str,
        workers: Mapping[str, WorkerProcess],
        report: Callable[[m.Event], None],
        record: Callable[..., None],
        before_report: Callable[[int], None],
    ) -> None:
        """`record` takes ledger events; `before_report(generation)` is called when a hang is about to be reported."""
        self._observe = policy.observe
        self._heartbeat_limit_s = policy.heartbeat_limit_s
        self._first_heartbeat_limit_s = policy.first_heartbeat_limit_s
        self._record, self._before_report = record, before_report
        self._node = node
        self._workers = workers
        self._report = report
        self.judge = Judge(policy)
        self._generation = 0
        self._told_step = 0
        self._suspected_s = 0.0
        self._accused: set[int] = set()
        self._over = False

    def generation_begins(self, generation: int, world_size: int) -> None:
        self._generation = generation
        self.judge.plan_changed(world_size)
        self._told_step = 0
        self._over = False
        self._accused.clear()

    def silent(self) -> list[tuple[WorkerProcess, float]]:
        """Workers of a script without `rt.run` that have called `rt.heartbeat` once, and not for too long since; or not
        even once, if there is a limit for that."""
        now_ns = time.monotonic_ns()
        found = []
        for worker in self._workers.values():
            if worker.pidfd < 0 or worker.writer is not None:
                continue
            beat_ns = worker.reading().beat_ns
            limit_s = self._heartbeat_limit_s if beat_ns else self._first_heartbeat_limit_s
            age_s = (now_ns - (beat_ns or worker.started_ns)) / 1e9
            if limit_s and age_s > limit_s:
                found.append((worker, age_s))
        return found

    async def loop(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.flush()
            self.look()

    def flush(self) -> None:
        """Tells the machine of finished steps, so that it knows them before it hears of a fault behind them."""
        best = 0
        for reading in (w.reading() for w in self._workers.values()):
            if reading.generation == self._generation and reading.last_step_ns:
                best = max(best, reading.step - 1)
        if best > self._told_step:
            self._told_step = best
            self._report(m.Progress(node=self._node, generation=self._generation, step=best))

    def look(self) -> None:
        readings = self._readings()
        verdict = self.judge.look(time.monotonic_ns(), readings)
        if self._observe and self._accused and verdict is None:
            self._accused.clear()  # they moved on
            self.judge.exonerate()
        if verdict is not None and not self._over and time.monotonic() - self._suspected_s > _SUSPECT_AGAIN_S:
            self._suspected_s = time.monotonic()
            self._verdict(verdict)

    def _verdict(self, verdict: Verdict) -> None:
        """Records what the judge says; a rank that moves on after a verdict which nobody acted on was not hung."""
        fresh = set(verdict.guilty) - self._accused
        for rank in sorted(fresh):
            x = verdict.situations[rank]
            told = {"rank": rank, "phase": x.phase, "step": x.step, "observe": self._observe}
            self._record("verdict", age_s=verdict.age_s, deadline_s=verdict.deadline_s, **told)
        self._accused.update(fresh)
        if not self._observe:
            self._before_report(self._generation)
            # The stacks are being written: nothing may move meanwhile.
            asyncio.get_running_loop().call_later(_STACKS_S, self._report_hang, verdict, self._generation)

    def generation_ends(self) -> None:
        """Ranks are on their way out: nobody is judged until the next generation begins."""
        self._over = True

    def left(self, rank: int, left_by: str) -> None:
        """A rank has left the generation. One that was held for hung and came to a safe point by itself was not."""
        if left_by == "safe_point" and rank in self._accused:
            self.judge.exonerate()
        self._accused.discard(rank)

    def intervals(self) -> dict[str, float]:
        """The longest time seen in each phase, in seconds: what limits are made from."""
        return {phase: round(age_s, 3) for phase, age_s in sorted(self.judge.longest_s.items())}

    def _readings(self) -> dict[int, Reading]:
        return {
            w.rank: replace(w.reading(), delay_ns=linux.run_delay_ns(w.pid))
            for w in self._workers.values()
            if w.pidfd >= 0 and w.writer is not None
        }

    def situations(self) -> dict[int, m.Situation]:
        """Where the node's ranks are, for the coordinator's inquest."""
        readings = {r: x for r, x in self._readings().items() if x.generation == self._generation}
        return self._named(self.judge.situations(time.monotonic_ns(), readings))

    def _named(self, situations: Mapping[int, m.Situation]) -> dict[int, m.Situation]:
        holders = {w.rank: w for w in self._workers.values()}
        return {
            rank: s.model_copy(update={"worker": holders[rank].id, "pid": holders[rank].pid})
            for rank, s in situations.items()
            if rank in holders
        }

    def _report_hang(self, verdict: Verdict, generation: int) -> None:
        if generation != self._generation:
            return
        self._report(
            m.HangSuspected(
                node=self._node,
                generation=self._generation,
                age_s=verdict.age_s,
                deadline_s=verdict.deadline_s,
                situations=self._named(verdict.situations),
            )
        )
