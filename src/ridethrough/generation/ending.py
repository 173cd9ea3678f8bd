"""How a generation ends: by a fault, which becomes an incident, or in a planned way after an agreed last step."""

from __future__ import annotations

from ridethrough.generation import messages as m
from ridethrough.generation.decision import Decision, decide
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.job_state import JobState
from ridethrough.generation.membership import Worker
from ridethrough.generation.planned import PlannedEnd
from ridethrough.ledger.schema import Detector, FaultClass


class Ending(JobState):
    """An incident is decided when every rank has accounted for itself: by leaving, by dying, or with its node. Then
    the root is among the reports, however late it came."""

    # --- faults -------------------------------------------------------------------------------------------------------

    def _report_worker(
        self, worker: Worker, fault_class: FaultClass, detected_by: Detector, cause: str, phase: str = ""
    ) -> None:
        rank = self.members.rank_of(worker)
        self._report(worker.id, worker.node, rank, fault_class, detected_by, cause, phase)

    def _report(
        self,
        worker: str,
        node: str,
        rank: int | None,
        fault_class: FaultClass,
        detected_by: Detector,
        cause: str,
        phase: str = "",
    ) -> None:
        self._fault(
            FaultReport(
                generation=self.generation,
                worker=worker,
                rank=rank,
                node=node,
                fault_class=fault_class,
                detected_by=detected_by,
                phase=phase,
                cause=cause,
            )
        )

    def _fault(self, report: FaultReport) -> None:
        if not self._incident.add(report, self._now_s):
            return
        self._out.append(m.FaultDeclared(report=report))
        if self.phase == "running":
            self._end_generation(report.first_line)

    def _end_generation(self, why: str) -> None:
        self.phase = "leaving"
        self._deadline_s = self._now_s + self.policy.leave_limit(self.members.num_active * self.members.num_workers)
        self._tell(lambda node: m.Leave(node=node, generation=self.generation, why=why))
        if self.members.counts["finished"]:
            for worker in self.members.workers():
                if worker.exited:
                    self.members.drop(worker)
        self._ask_store()

    def _decide(self) -> bool:
        """Closes the incident; False if it ends the job."""

        def choose(root: FaultReport) -> Decision:
            can_replace_node = self.members.num_standby > 0 and self.members.place_of(root.node) is not None
            return decide(
                self.policy,
                self.history,
                root,
                now_s=self._now_s,
                replaced=self._incident.replaced,
                can_replace_node=can_replace_node,
            )

        decision, root, decided = self._incident.decide(f"{self.epoch}.{self.generation}", self.generation, choose)
        self._out += decided
        planned = self._planned
        if decision.rung == "give_up":
            if planned is not None and planned.code is not None:
                self._done(planned.code, f"stopped by {planned.cause}; a fault came before the last save")
            else:
                self._done(decision.code, decision.why)
            return False
        worker = self.members.worker(root.worker)
        if decision.rung == "replace_node" and root.fault_class not in ("node_loss", "preemption"):
            self._evict(root.node)
        elif decision.replace_root and worker is not None:
            self._kill(worker, decision.why)
        return True

    def _replace_unfit(self) -> None:
        """As many as there are standby nodes; the others go on with new processes."""
        for node, why in list(self._unfit.items())[: self.members.num_standby]:
            if self.members.place_of(node) is not None:
                self._incident.takes_node(f"{node}: {why}")
                self._evict(node)
        self._unfit.clear()

    def _evict(self, node: str) -> None:
        """The node's place goes to a standby; it waits behind the others, or is cordoned."""
        name = self.members.name_of(node)
        for worker in self.members.remove(node):
            self._out.append(m.Kill(node=node, worker=worker.id, why="its node is replaced"))
        self._formation.store.lost(node)
        if self._mark_host(name):
            self._dismiss_cordoned(node, name)
        else:
            self.members.add(node, name)

    def _mark_host(self, name: str) -> bool:
        """True if the host is cordoned by this; standbys of that name go."""
        cordoned = self.history.mark_host(
            name,
            self._now_s,
            cordon_after=self.policy.cordon_after,
            window_s=self.policy.cordon_window_s,
        )
        if cordoned:
            for node in self.members.standby:
                if node.name == name:
                    self.members.remove(node.id)
                    self._dismiss_cordoned(node.id, name)
        return cordoned

    def _dismiss_cordoned(self, node: str, name: str) -> None:
        why = f"host {name} is cordoned: lost or guilty {self.policy.cordon_after} times"
        self._out.append(m.Dismiss(node=node, code=ExitCode.RESTARTS_EXHAUSTED, reason=why))

    # --- in a planned way ---------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """The job is to end in a planned way."""
        return self._planned is not None and self._planned.code is not None

    @property
    def stop_agreed(self) -> bool:
        """The ranks agreed on the last step of a planned stop."""
        return self._planned is not None and self.stopping and self._planned.agreed

    def _stop(self, cause: str, code: int, deadline_s: float) -> None:
        """A fault that comes between makes a new generation, which then stops at once: the state is saved anyway."""
        if self._planned is None:
            self._planned = PlannedEnd(cause, code, deadline_s)
        else:
            self._planned.cause, self._planned.code, self._planned.deadline_s = cause, code, deadline_s
        if self.phase == "forming" and self.plan is None:
            return self._done(code, f"stopped by {cause}")
        return self._ask_steps()

    def _ask_steps(self) -> None:
        """Begins to agree on a last step, once everybody is in the generation."""
        planned = self._planned
        if planned is None or planned.asked or self.phase != "running" or self.members.counts["entering"]:
            return
        planned.asked = True
        self._tell(lambda node: m.AskStep(node=node, generation=self.generation, cause=planned.cause))
        if self.members.counts["finished"]:
            for worker in self.members.workers():
                if worker.state == "finished":
                    self._answer(worker, worker.done_step)

    def _answer(self, worker: Worker, step: int) -> None:
        planned = self._planned
        if planned is None or not planned.asked:
            return
        planned.answer(worker, step)
        last = planned.agree(self.members.num_active * self.members.num_workers)
        if last is not None:
            self._tell(lambda node: m.StopAt(node=node, generation=self.generation, step=last))

    def _finish_if_all(self) -> None:
        if not self.members.all_in("finished"):
            return None
        planned = self._planned
        if planned is None or not any(w.stopped for w in self.members.workers()):
            return self._done(ExitCode.DONE, "done")
        if planned.code is not None:
            return self._done(planned.code, f"stopped by {planned.cause}, state saved")
        return self._end_generation(planned.cause)
