"""The generation machine: events in, actions out. It alone writes plans.

A job is `learning` (a coordinator was started again and hears who is there), `forming` (processes start or come back),
`running` (a plan is out), `leaving` (a fault or a planned end is over for this generation, its ranks are on their way
out) or `done`. Time is the `now_s` that comes with each event: seconds of any monotonic clock, the same one for all
events. No method blocks, a repeated or late event changes nothing, and none costs more with a larger world but those
that speak to all of it: a plan, the end of a generation, a limit that has passed.

An incident is decided when every rank has accounted for itself, by leaving, by dying, or with its node: then the root
is among the reports, however late it came. A script that never calls `rt.run` stays in `forming`, and a death there
starts all of its processes anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ridethrough.generation import messages as m
from ridethrough.generation.decision import Decision, decide
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import DetectedBy, FaultClass, FaultReport
from ridethrough.generation.formation import Formation
from ridethrough.generation.history import History
from ridethrough.generation.incident import Incident
from ridethrough.generation.learning import Learner
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import Plan
from ridethrough.generation.planned import PlannedEnd
from ridethrough.generation.policy import Policy
from ridethrough.generation.quorum import Quorum

_ALIVE_IS_PROGRESS_S = 60.0
_MAX_REPORTS = 16

Phase = Literal["learning", "forming", "running", "leaving", "done"]


class GenerationMachine:
    """Decides who trains in which generation. `min_nodes` and `max_nodes` bound the world; each node has
    `num_workers` ranks. `epoch` is the coordinator's claim; a later one has a higher epoch. `majority`: plan only with
    more than half of the last plan's nodes, because no shared storage tells coordinators apart."""

    def __init__(
        self,
        *,
        num_workers: int,
        min_nodes: int = 1,
        max_nodes: int = 1,
        policy: Policy | None = None,
        epoch: int = 0,
        majority: bool = False,
    ) -> None:
        self.policy = policy or Policy()
        self.history = History()
        self.members = Membership(num_workers)
        self.phase: Phase = "forming"
        self.generation = 0
        self.plan: Plan | None = None
        self.epoch = epoch
        self._quorum = Quorum(self.members, self.policy, min_nodes, max_nodes, majority=majority)
        self._formation = Formation(self.members, self.policy, epoch)
        self._incident = Incident()
        self._planned: PlannedEnd | None = None
        self._learner: Learner | None = None
        self._noticed: dict[str, str] = {}
        self._killed: dict[str, float] = {}
        self._deadline_s: float | None = None
        self._check_starts_s = 0.0
        self._entered_s = 0.0
        self._attached_ever = False
        self._highest = 0
        self._now_s = 0.0
        self._out: list[m.Action] = []

    @property
    def stop_agreed(self) -> bool:
        """The ranks agreed on the last step of a planned stop."""
        return self._planned is not None and self._planned.code is not None and self._planned.agreed

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        """Takes one event; returns what is to be done, in order. Never raises on a late or unknown worker."""
        if self.phase == "done":
            return []
        self._out, self._now_s = [], now_s
        self._quorum.passes(now_s)
        if self._learner is not None:
            self._while_learning(event, self._learner)
        else:
            self._take(event)
        self._advance()
        return self._out

    def _take(self, event: m.Event) -> None:
        handler: Callable[[m.Event], None] | None = getattr(self, f"_on_{event.kind}", None)
        if handler is not None and self.phase != "done":
            handler(event)

    def _advance(self) -> None:
        if self.phase == "running":
            self._grow()
        if self.phase == "leaving":
            self._all_out()
        if self.phase == "forming":
            self._form()

    # --- nodes -------------------------------------------------------------------------------------------------------

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
            self.members.add(event.node, event.name)
            self._quorum.joined(self._now_s)

    def _on_node_rejoined(self, event: m.NodeRejoined) -> None:
        """Only a machine that has begun nothing yet learns; to any other the node is a newcomer without workers."""
        plan = event.plan
        if plan.epoch > self.epoch or self.members.knows(event.node):
            return None  # a later coordinator exists; or nothing was lost
        begun = self.generation > 0 or self.members.num_active > 0
        if not begun and plan.epoch < self.epoch and plan.for_node(event.node) is not None:
            self.phase, self._learner = "learning", Learner(self._now_s, self.policy.learn_limit_s)
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
        detected_by: DetectedBy = "lease" if fault_class == "node_loss" else "user"
        if gone or self.phase != "forming":
            self._incident.replaced = True
            self._report(gone[0].id if gone else "", node, rank, fault_class, detected_by, cause)

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

    # --- learning ----------------------------------------------------------------------------------------------------

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
        learned = learner.settle(self.members, self._now_s)
        self.plan, self.generation, self._highest = learner.plan, learner.plan.generation, learner.highest_generation
        self.history = learner.plan.history.model_copy(deep=True)
        self.history.rebase(self._now_s)
        self._attached_ever |= learned.attached
        self._quorum.planned(learner.plan)
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
            cause = f"not back after the coordinator was started again: {', '.join(learned.missing) or 'some workers'}"
            node = learned.missing[0] if learned.missing else ""
            self._report("", node, None, "node_loss" if node else "exit", "lease", cause)
        elif self.phase == "running":
            self._ask_steps()
            self._finish_if_all()

    # --- workers -----------------------------------------------------------------------------------------------------

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

    # --- limits ------------------------------------------------------------------------------------------------------

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

    def _kill(self, worker: Worker, why: str) -> None:
        if not worker.killed:
            worker.killed = True
            self._killed[worker.id] = self._now_s
            self._out.append(m.Kill(node=worker.node, worker=worker.id, why=why))

    def _rebuild_limit(self) -> float:
        world_size = self.members.num_active * self.members.num_workers
        return self.policy.rebuild_limit(world_size, self.history.longest_rebuild_s)

    # --- ending a generation -----------------------------------------------------------------------------------------

    def _report_worker(
        self, worker: Worker, fault_class: FaultClass, detected_by: DetectedBy, cause: str, phase: str = ""
    ) -> None:
        rank = self.members.rank_of(worker)
        self._report(worker.id, worker.node, rank, fault_class, detected_by, cause, phase)

    def _report(
        self,
        worker: str,
        node: str,
        rank: int | None,
        fault_class: FaultClass,
        detected_by: DetectedBy,
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

    def _all_out(self) -> None:
        counts = self.members.counts
        if counts["entering"] or counts["inside"] or counts["finished"]:
            if self.policy.max_restarts and not any(r.fatal for r in self._incident.reports):
                self._spawn()  # while the survivors leave
            return
        self._out.append(m.AllOut(generation=self.generation))
        self._deadline_s = None
        if self._planned is not None and self._planned.code is None:
            self._planned = None
            for node, cause in self._noticed.items():
                place = self.members.place_of(node) or 0
                rank = place * self.members.num_workers
                self._report("", node, rank, "preemption", "user", cause)
        if not self._incident.open or self._decide():
            self.phase = "forming"

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
        elif decision.rung == "replace_process" and worker is not None:
            self._kill(worker, decision.why)
            self.members.drop(worker)
        return True

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

    # --- forming the next one ----------------------------------------------------------------------------------------

    def _form(self) -> None:
        if self._incident.open and not self._settle_while_forming():
            return None
        for node, cause in self._noticed.items():
            self.members.remove(node)
            self._formation.store.lost(node)
            self._out.append(m.Dismiss(node=node, code=ExitCode.PREEMPTED, reason=cause))
        self._noticed.clear()
        counts = self.members.counts
        plain = not self._attached_ever and counts["starting"] + counts["finished"] > 0
        if plain and self._may_grow():
            self._restart_plain("a node joined; a script without rt.run is started anew as a whole")
            plain = False
        if not plain:  # the processes of a script without rt.run were told their world when they were started
            self.members.promote(self._quorum.max_nodes)
        if not self._enough():
            return None
        self._ask_store()
        if self._formation.store.hopeless:
            return self._done(ExitCode.RESTARTS_EXHAUSTED, "no node could open a store for the process groups")
        if self._formation.store.endpoint is None:
            return None
        self._spawn()
        if self._attached_ever and counts["finished"]:
            return self._recall_plain()
        if self.members.all_in("ready"):
            self._enter()
        return None

    def _settle_while_forming(self) -> bool:
        """A process died on its way to a generation. Its peers may have died of it before: a moment for the reports."""
        patience_s = self.policy.decide_after_s
        if not self._attached_ever and not self._incident.explained:
            patience_s = max(patience_s, self.policy.leave_limit_s)
        if self._incident.age_s(self._now_s) < patience_s or not self._decide():
            return False
        if not self._attached_ever:
            self._restart_plain("a peer died; a script without rt.run is started anew as a whole")
        return True

    def _restart_plain(self, why: str) -> None:
        for worker in self.members.workers():
            if not worker.exited:
                self._kill(worker, why)
            self.members.drop(worker)
        self._formation.store.taken()

    def _recall_plain(self) -> None:
        """Some processes use `rt.run`, others ended before it: without them no world comes together."""
        for worker in self.members.workers():
            if worker.exited:
                cause = "the process ended with exit code 0 before it came to rt.run"
                self._report_worker(worker, "exit", "waitpid", cause)
                self.members.drop(worker)
                self._incident.replaced = True

    def _enough(self) -> bool:
        answer = self._quorum.ask(self._now_s, first=self.generation == 0)
        if answer.what == "give_up":
            self._done(ExitCode.RESTARTS_EXHAUSTED, answer.why)
        elif answer.what == "wait" and self._planned is not None and self._planned.code is not None:
            self._done(self._planned.code, f"stopped by {self._planned.cause}; too few nodes for a last save")
        return answer.what == "go"

    def _may_grow(self) -> bool:
        members, num_max = self.members, self._quorum.max_nodes
        if not members.num_standby or members.num_active >= num_max:
            return False
        complete = members.num_active + members.num_standby >= num_max
        return complete or self._quorum.quiet_s(self._now_s) >= self.policy.grow_after_s

    def _grow(self) -> None:
        """Newcomers to a world that is smaller than it may be: it ends in a planned way, without charge."""
        counts = self.members.counts
        if self._planned is None and not counts["entering"] and not counts["finished"] and self._may_grow():
            if not self._incident.has_stepped:
                return  # no step since the last incident: first show that this world works
            self._planned = PlannedEnd("a node joined", None, self._now_s + self.policy.grow_limit_s)
            self._ask_steps()

    def _ask_store(self) -> None:
        request = self._formation.store.ask(self._now_s)
        if request is not None:
            self._out.append(request)

    def _spawn(self) -> None:
        self._out += self._formation.spawn(self._now_s, generation=self.generation + 1, restarts=self.history.restarts)

    def _enter(self) -> None:
        before = self.plan
        self.generation = max(self.generation, self._highest) + 1
        self.plan = plan = self._formation.plan(self.generation, self.history)
        self._quorum.planned(plan)
        shrunk = before is not None and len(plan.nodes) < len(before.nodes)
        self._out += self._incident.settle("shrink" if shrunk else None)
        self.phase = "running"
        self._entered_s = self._now_s
        self._deadline_s = self._now_s + self._rebuild_limit()
        for worker in self.members.workers():
            self.members.move(worker, "entering")
            worker.stopped, worker.step = False, None
        if self._planned is not None:
            self._planned.generation_begins()
        self._tell(lambda node: m.Enter(node=node, plan=plan))

    # --- ending in a planned way -------------------------------------------------------------------------------------

    def _on_stop_requested(self, event: m.StopRequested) -> None:
        if self._planned is not None and self._planned.code is not None:
            return self._done(event.code, f"stopped at once: {event.cause}")
        return self._stop(event.cause, event.code, self._now_s + event.grace_s)

    def _stop(self, cause: str, code: int, deadline_s: float) -> None:
        """A fault that comes between makes a new generation, which then stops at once: the state is saved anyway."""
        if self._planned is None:
            self._planned = PlannedEnd(cause, code, deadline_s)
        else:
            self._planned.cause, self._planned.code, self._planned.deadline_s = cause, code, deadline_s
        if self.phase == "forming" and (self.generation == 0 or not self._attached_ever):
            return self._done(code, f"stopped by {cause}")
        return self._ask_steps()

    def _on_step_at(self, event: m.StepAt) -> None:
        worker = self.members.worker(event.worker)
        if worker is not None and event.generation == self.generation and self.phase == "running":
            self._answer(worker, event.step)

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

    def _done(self, code: int, reason: str) -> None:
        self.phase = "done"
        self._out += self._incident.settle("give_up" if code == ExitCode.RESTARTS_EXHAUSTED else None)
        self._out.append(m.JobDone(code=code, reason=reason))

    def _tell(self, action: Callable[[str], m.Action]) -> None:
        self._out.extend(action(node.id) for node in self.members.active)
