"""The generation machine: events in, actions out. It alone writes plans.

A job is `learning` (its coordinator has taken over from an earlier one and hears who is there), `forming` (processes
start or come back), `running` (a plan is out), `leaving` (a fault or a planned end is over for this generation, its
ranks are on their way out) or `done`. Time is the `now_s` that comes with each event: seconds of any monotonic clock,
the same one for all events. No method blocks, a repeated or late event changes nothing, and none costs more with a
larger world but those that speak to all of it: a plan, the end of a generation, a limit that has passed.

An incident is decided when every rank has accounted for itself, by leaving, by dying, or with its node: then the root
is among the reports, however late it came. A script that never calls `rt.run` stays in `forming`, and a death there
starts all of its processes anew.
"""

from __future__ import annotations

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.job_state import Phase
from ridethrough.generation.node_events import NodeEvents

__all__ = ["GenerationMachine", "Phase"]

_ALIVE_IS_PROGRESS_S = 60.0
_MAX_REPORTS = 16


class GenerationMachine(NodeEvents):
    """Decides who trains in which generation. `min_nodes` and `max_nodes` bound the world; each node has
    `num_workers` ranks. `epoch` is the coordinator's claim; a later one has a higher epoch. `earlier`: the generation
    that an earlier coordinator has planned last and that may still train; 0: none."""

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        """Takes one event; returns what is to be done, in order. Never raises on a late or unknown worker."""
        if self.phase == "done":
            return []
        self._out, self._now_s = [], now_s
        self._quorum.passes(now_s)
        if self.phase == "learning":
            self._while_learning(event)
        else:
            self._take(event)
        self._advance()
        return self._out

    def _advance(self) -> None:
        if self.phase == "running":
            self._grow()
        if self.phase == "leaving":
            self._all_out()
        if self.phase == "forming":
            self._form()

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_ready(self, event: m.WorkerReady) -> None:
        worker = self.members.worker(event.worker)
        if worker is None:
            return
        if worker.state in ("entering", "inside", "finished"):
            if event.left != self.generation:
                return
            if self.phase == "running":
                self._report_worker(worker, "collective", "collective", f"left generation {event.left} by itself")
        worker.attached = self._attached_ever = True
        worker.inventory = event.inventory
        self.members.move(worker, "ready")

    def _on_worker_entered(self, event: m.WorkerEntered) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or event.generation != self.generation or worker.state != "entering":
            return
        self.members.move(worker, "inside")
        if self.phase == "running" and not self.members.counts["entering"]:
            self._deadline_s = None
            took_s = self._now_s - self._entered_s
            self.history.longest_rebuild_s = max(self.history.longest_rebuild_s, took_s)
            self._ask_steps()

    def _on_worker_faulted(self, event: m.WorkerFaulted) -> None:
        report = event.report
        if report.generation != self.generation:
            return
        worker = self.members.worker(report.worker)
        plain = self.phase == "forming" and not self._attached_ever and worker is not None
        if self.phase in ("running", "leaving") or plain:
            self._fault(report)

    def _on_worker_exited(self, event: m.WorkerExited) -> None:
        worker, report = self.members.worker(event.worker), event.report
        if worker is None:
            return None
        if report is None and (worker.state == "finished" or not self._attached_ever):
            if self.phase == "leaving":
                return self.members.drop(worker)  # it would have been called back
            worker.exited = True
            self.members.move(worker, "finished")
            return self._finish_if_all()
        rank, node = self.members.rank_of(worker), worker.node
        if report is None:
            where = "in the middle of a generation" if worker.attached else "before it came to rt.run"
            report = FaultReport(
                generation=self.generation,
                worker=worker.id,
                node=node,
                fault_class="exit",
                detected_by="waitpid",
                cause=f"the process ended with exit code 0 {where}",
            )
        ours = report.killed_by_us or (worker.killed and report.signal is not None)
        report = report.model_copy(update={"rank": rank, "generation": self.generation, "killed_by_us": ours})
        if not self._attached_ever and self._now_s - worker.spawned_s > _ALIVE_IS_PROGRESS_S:
            self.history.no_progress = 0  # a script without `rt.run` shows its progress only by staying alive
        self.members.drop(worker)
        self._killed.pop(worker.id, None)
        if report.is_ours and self.phase != "running" and not self._incident.open:
            return None  # the incident that it was killed for has been decided
        self._incident.replaced = True
        return self._fault(report)

    def _on_worker_finished(self, event: m.WorkerFinished) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or event.generation != self.generation or self.phase != "running":
            return
        if worker.state in ("entering", "inside"):
            worker.stopped, worker.done_step = event.stopped, event.step
            self.members.move(worker, "finished")
            self._answer(worker, event.step)
            self._finish_if_all()

    def _on_progress(self, event: m.Progress) -> None:
        if event.generation == self.generation and self.phase in ("running", "leaving"):
            self._incident.stepped()
            self.history.older_than = None
            self.history.progressed(event.step, forgive_after_steps=self.policy.forgive_after_steps)

    def _on_store_opened(self, event: m.StoreOpened) -> None:
        self._formation.store.opened(event.serial, event.endpoint)

    def _on_step_at(self, event: m.StepAt) -> None:
        worker = self.members.worker(event.worker)
        if worker is not None and event.generation == self.generation and self.phase == "running":
            self._answer(worker, event.step)

    def _on_stop_requested(self, event: m.StopRequested) -> None:
        if self._planned is not None and self._planned.code is not None:
            return self._done(event.code, f"stopped at once: {event.cause}")
        return self._stop(event.cause, event.code, self._now_s + event.grace_s)

    # --- limits -------------------------------------------------------------------------------------------------------

    def _on_tick(self, event: m.Tick) -> None:
        planned = self._planned
        if planned is not None and self._now_s >= planned.deadline_s:
            if planned.code is not None:
                why = f"stopped by {planned.cause}; not all ranks were done in time"
                return self._done(planned.code, why)
            if self.phase == "running":
                self._end_generation(planned.cause)
        for worker_id, since_s in list(self._killed.items()):
            self._check_killed(worker_id, since_s)
        if self.phase == "forming" and self._attached_ever and self._now_s >= self._check_starts_s:
            self._check_starts()
        if self._deadline_s is not None and self._now_s >= self._deadline_s:
            self._deadline_s = None
            self._kill_late()
        return None

    def _kill_late(self) -> None:
        """Who makes its process group for too long, or has not left in time, is ended."""
        entering = self.phase == "running"
        states = ("entering",) if entering else ("entering", "inside", "finished")
        late = [w for w in self.members.workers() if w.state in states and not w.killed]
        why = f"did not {'enter' if entering else 'leave'} generation {self.generation} within its limit"
        for worker in late:
            self._kill(worker, why)
        if entering:
            for worker in late[:_MAX_REPORTS]:
                self._report_worker(worker, "hang", "heartbeat", why, phase="recovery")

    def _check_starts(self) -> None:
        """Others wait for a process that does not come to its `rt.run`."""
        limit_s = self.policy.start_limit_s
        starting = [w for w in self.members.workers() if w.state == "starting" and not w.killed]
        self._check_starts_s = min((w.spawned_s for w in starting), default=self._now_s) + limit_s
        for worker in starting:
            if self._now_s - worker.spawned_s >= limit_s:
                why = f"did not come to rt.run within {limit_s:.0f} s"
                self._kill(worker, why)
                self._report_worker(worker, "hang", "heartbeat", why, phase="init")
        if self._check_starts_s <= self._now_s:
            self._check_starts_s = self._now_s + 1.0

    def _check_killed(self, worker_id: str, since_s: float) -> None:
        worker = self.members.worker(worker_id)
        if worker is None:
            del self._killed[worker_id]
        elif self._now_s - since_s >= self.policy.kill_limit_s:
            del self._killed[worker_id]
            why = f"process {worker_id} cannot be ended, its node is given up"
            self._out.append(m.Dismiss(node=worker.node, code=ExitCode.RESTARTS_EXHAUSTED, reason=why))
            self._lose(worker.node, "node_loss", why)
