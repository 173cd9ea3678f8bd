"""Nodes come, come back to a coordinator that was started again, and go."""

from __future__ import annotations

from collections.abc import Callable

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.forming import Forming
from ridethrough.generation.learning import Learner
from ridethrough.generation.planned import PlannedEnd
from ridethrough.ledger.schema import Detector, FaultClass


class NodeEvents(Forming):
    """A newcomer is a standby first, whatever its name: a member with a valid lease keeps its place."""

    _learner: Learner | None = None

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
        """Only a machine that has begun nothing yet learns; to any other the node is a newcomer without workers."""
        plan = event.plan
        if plan.epoch > self.epoch or self.members.knows(event.node):
            return None  # a later coordinator exists; or nothing was lost
        begun = self.generation > 0 or self.members.num_active > 0
        if not begun and plan.epoch < self.epoch:
            self.phase, self._learner = "learning", Learner(event, self._now_s, self.policy.learn_limit_s)
            return self._while_learning(event, self._learner)
        self._highest = max(self._highest, plan.generation)
        for snapshot in event.workers:
            why = "it belongs to a generation that is over"
            self._out.append(m.Kill(node=event.node, worker=snapshot.worker, why=why))
        return self._on_node_joined(m.NodeJoined(node=event.node, name=event.name, num_workers=0))

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

    def _lose(self, node: str, fault_class: FaultClass, cause: str) -> None:
        """A node is gone with all of its workers: one report, for its first rank."""
        place, name = self.members.place_of(node), self.members.name_of(node)
        gone = self.members.remove(node)
        self._formation.store.lost(node)
        self._noticed.pop(node, None)
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

    def _while_learning(self, event: m.Event, learner: Learner) -> None:
        if isinstance(event, m.NodeRejoined):
            if event.plan.epoch < self.epoch:
                learner.hear(event)
        elif isinstance(event, (m.NodeJoined, m.StopRequested, m.Tick)):
            self._take(event)
        elif not (isinstance(event, m.NodeLeft) and learner.left(event.node)):
            learner.waiting.append(event)
        if self.phase == "learning" and learner.over(self._now_s):
            self._learned(learner)

    def _learned(self, learner: Learner) -> None:
        """Everybody of the plan is here and inside: nothing has to be restarted. Else the generation ends."""
        self._learner = None
        self.plan = plan = learner.plan()
        learned = learner.settle(self.members, plan, self._now_s)
        self.generation, self._highest = plan.generation, learner.highest_generation
        self.history = plan.history.model_copy(deep=True)
        self.history.rebase(self._now_s)
        self._attached_ever |= learned.attached
        self._quorum.planned(plan)
        self.phase = "running"
        if self.members.counts["entering"]:
            self._deadline_s = self._now_s + self._rebuild_limit()
        for node, worker in learned.strays:
            self._out.append(m.Kill(node=node, worker=worker, why="it belongs to a generation that is over"))
        for stranger in learned.strangers:
            self._on_node_rejoined(stranger)
        for event in learner.waiting:
            self._take(event)
        if self.phase == "running" and not learned.alive:
            who = f"nodes {', '.join(map(str, learned.missing))}" if learned.missing else "some workers"
            cause = f"not back after the coordinator was started again: {who}"
            rank = learned.missing[0] * self.members.num_workers if learned.missing else None
            self._report("", "", rank, "node_loss" if learned.missing else "exit", "lease", cause)
        elif self.phase == "running":
            self._ask_steps()
            self._finish_if_all()
