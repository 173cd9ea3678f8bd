"""Nodes come, come back to a coordinator that was started again, and go."""

from __future__ import annotations

from collections.abc import Callable

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.forming import Forming
from ridethrough.generation.learning import Learned, Learner
from ridethrough.generation.plan import Plan
from ridethrough.generation.planned import PlannedEnd
from ridethrough.ledger.schema import Detector, FaultClass

_STRAY = "it belongs to a generation that is over"


class NodeEvents(Forming):
    """A newcomer is a standby first, whatever its name: a member with a valid lease keeps its place."""

    def _take(self, event: m.Event) -> None:
        handler: Callable[[m.Event], None] | None = getattr(self, f"_on_{event.kind}", None)
        if handler is not None and self.phase != "done":
            handler(event)

    def _on_node_joined(self, event: m.NodeJoined) -> None:
        size = self.members.num_workers
        if self.members.knows(event.node):
            return
        if event.num_workers not in (0, size):
            why = f"{event.name} has {event.num_workers} ranks, the job's nodes have {size}"
            self._out.append(m.Dismiss(node=event.node, code=ExitCode.USAGE, reason=why))
        elif event.name in self.history.cordoned:
            self._dismiss_cordoned(event.node, event.name)
        else:
            self.members.add(event.node, event.name, event.place)
            self._quorum.joined(self._now_s)

    def _on_node_rejoined(self, event: m.NodeRejoined) -> None:
        """To a machine that does not learn it is a newcomer without workers."""
        if event.plan.epoch > self.epoch or self.members.knows(event.node):
            return  # a later coordinator exists; or nothing was lost
        self._highest = max(self._highest, event.plan.generation)
        for snapshot in event.workers:
            self._out.append(m.Kill(node=event.node, worker=snapshot.worker, why=_STRAY))
        self._on_node_joined(m.NodeJoined(node=event.node, name=event.name, num_workers=0))

    def _on_node_left(self, event: m.NodeLeft) -> None:
        fault_class: FaultClass = "node_loss" if event.lost else "preemption"
        self._lose(event.node, fault_class, f"node {event.node} {'is lost' if event.lost else 'left'}")

    def _on_notice(self, event: m.Notice) -> None:
        if self.members.place_of(event.node) is None:
            if self.members.knows(event.node):
                self.members.remove(event.node)
                self._out.append(m.Dismiss(node=event.node, code=ExitCode.PREEMPTED, reason=event.cause))
            return
        self._noticed[event.node] = event.cause
        deadline_s = self._now_s + event.grace_s
        if len(self._noticed) == self.members.num_active and not self.members.num_standby:
            if self._planned is None or self._planned.code is None:
                self._stop(event.cause, ExitCode.PREEMPTED, deadline_s)
        elif self._planned is None and self.phase == "running":
            self._planned = PlannedEnd(event.cause, None, deadline_s)
            self._ask_steps()
        elif self._planned is not None and self._planned.code is None:
            self._planned.deadline_s = min(self._planned.deadline_s, deadline_s)

    def _on_node_unfit(self, event: m.NodeUnfit) -> None:
        """Its ranks are on their way out: the place is given away when all are."""
        current = event.generation == self.generation and self.phase == "leaving"
        if current and self.members.place_of(event.node) is not None:
            self._unfit.setdefault(event.node, event.why)

    def _lose(self, node: str, fault_class: FaultClass, cause: str) -> None:
        """A node is gone with all of its workers: one report, for its first rank."""
        place, name = self.members.place_of(node), self.members.name_of(node)
        gone = self.members.remove(node)
        self._formation.store.lost(node)
        self._noticed.pop(node, None)
        self._unfit.pop(node, None)
        if place is None:
            return
        if fault_class == "node_loss":
            self._mark_host(name)
        rank = place * self.members.num_workers
        detected_by: Detector = "lease" if fault_class == "node_loss" else "user"
        if gone or self.phase != "forming":
            self._incident.replaced = True
            self._report(gone[0].id if gone else "", node, rank, fault_class, detected_by, cause)

    # --- learning -----------------------------------------------------------------------------------------------------

    def _while_learning(self, event: m.Event) -> None:
        learner = self._learner
        if isinstance(event, m.NodeRejoined):
            if event.plan.epoch < self.epoch:
                learner.hear(event)
        elif isinstance(event, m.NodeLeft):
            learner.forget(event.node)
            self._take(event)
        elif isinstance(event, (m.NodeJoined, m.StopRequested, m.Tick)):
            self._take(event)
        else:
            learner.waiting.append(event)
        if self.phase == "learning" and learner.over(self._now_s):
            self._learned(learner)

    def _learned(self, learner: Learner) -> None:
        """Everybody of the plan is here and inside: nothing has to be restarted. Else the generation ends."""
        self.phase = "running"
        learned, plan = Learned(alive=False), learner.plan()
        if plan is None:
            self.generation = self._highest
        else:
            learned = learner.settle(self.members, plan, self._now_s)
            self._continue(plan)
        self._highest = max(self._highest, learner.highest_generation)
        for node, worker in learned.strays:
            self._out.append(m.Kill(node=node, worker=worker, why=_STRAY))
        for stranger in learned.strangers:
            self._on_node_rejoined(stranger)
        for event in learner.waiting:
            self._take(event)
        if self.phase == "running" and not learned.alive:
            self._report_not_back(learned.missing, all_nodes=plan is None)
        elif self.phase == "running":
            self._ask_steps()
            self._finish_if_all()

    def _continue(self, plan: Plan) -> None:
        self.plan, self.generation = plan, plan.generation
        self.history = plan.history.model_copy(deep=True)
        self.history.rebase(self._now_s)
        self._quorum.planned(plan)
        if self.members.counts["entering"]:
            self._deadline_s = self._now_s + self._rebuild_limit()

    def _report_not_back(self, missing: list[int], *, all_nodes: bool) -> None:
        who = f"nodes {', '.join(map(str, missing))}" if missing else "all nodes" if all_nodes else "some workers"
        rank = missing[0] * self.members.num_workers if missing else None
        fault_class: FaultClass = "node_loss" if missing or all_nodes else "exit"
        cause = f"not back after the coordinator was started again: {who}"
        self._report("", "", rank, fault_class, "lease", cause)
