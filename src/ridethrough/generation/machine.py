"""The generation machine: events in, actions out. It alone writes plans.

A job is `learning` (a coordinator was started again and hears who is there), `forming` (processes start or come back),
`running` (a plan is out), `leaving` (a fault ended the generation, survivors are on their way out) or `done`. Time is
the `now_s` that comes with each event: seconds of any monotonic clock, the same one for all events. No method blocks,
and a repeated or late event changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport, root_cause
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import NodeRanks, Plan
from ridethrough.generation.policy import Decision, History, Policy, decide

Phase = Literal["learning", "forming", "running", "leaving", "done"]
_LEARN_S = 10.0  # a coordinator that was started again waits so long for the nodes of the plan that it learns of


class GenerationMachine:
    """Decides who trains in which generation. `min_nodes` and `max_nodes` bound the world; each node has
    `num_workers` ranks. `epoch` is the coordinator's claim; a later one has a higher epoch."""

    def __init__(
        self,
        *,
        num_workers: int,
        min_nodes: int = 1,
        max_nodes: int = 1,
        policy: Policy | None = None,
        epoch: int = 0,
    ) -> None:
        self.policy = policy or Policy()
        self.history = History()
        self.members = Membership(num_workers)
        self.phase: Phase = "forming"
        self.generation = 0
        self.plan: Plan | None = None
        self.epoch = epoch
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._last_join_s = 0.0
        self._short_since_s: float | None = None
        self._learn_until_s: float | None = None
        self._serial = 0
        self._store: str | None = None
        self._store_asked = False
        self._store_node = ""
        self._spawned = 0
        self._reports: list[FaultReport] = []
        self._reported_s = 0.0
        self._deadline_s: float | None = None
        self._replaced = False
        self._attached_ever = False
        self._stepped = True
        self._incident = ""
        self._attempts = 0
        self._stop: m.StopRequested | None = None
        self._stop_deadline_s = 0.0
        self.stop_agreed = False
        self._out: list[m.Action] = []

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        """Takes one event; returns what is to be done, in order. Never raises on a late or unknown worker."""
        if self.phase == "done":
            return []
        self._out = []
        getattr(self, f"_on_{event.kind}")(event, now_s)
        if self.phase == "learning":
            self._learned(now_s)
        if self.phase == "leaving":
            self._all_out(now_s)
        if self.phase == "forming":
            self._form(now_s)
        return self._out

    # --- events ------------------------------------------------------------------------------------------------------

    def _on_node_joined(self, event: m.NodeJoined, now_s: float) -> None:
        if self.members.add(event.node, event.name):
            self._last_join_s = now_s

    def _on_node_rejoined(self, event: m.NodeRejoined, now_s: float) -> None:
        """Only a machine that has planned nothing yet learns; to any other the node is a newcomer without workers."""
        plan = event.plan
        place = next((i for i, n in enumerate(plan.nodes) if n.node == event.node), None)
        fresh = self.generation == 0 or self.phase == "learning"
        if self.members.place_of(event.node) is not None:
            return
        if not fresh or place is None or plan.generation < self.generation or plan.epoch >= self.epoch:
            for snapshot in event.workers:
                why = "it belongs to a generation that is over"
                self._out.append(m.Kill(node=event.node, worker=snapshot.worker, why=why))
            self._on_node_joined(m.NodeJoined(node=event.node, name=event.name, num_workers=0), now_s)
            return
        if plan.generation > self.generation:
            self.generation, self.plan = plan.generation, plan
            self.history = plan.history.model_copy(deep=True)
            self.phase, self._learn_until_s = "learning", now_s + _LEARN_S
        self.members.restore(event.node, event.name, place)
        for snapshot in event.workers:
            self.members.place(
                Worker(
                    snapshot.worker,
                    event.node,
                    snapshot.local_rank,
                    now_s,
                    state=snapshot.state,
                    attached=snapshot.attached,
                )
            )
            self._attached_ever |= snapshot.attached

    def _learned(self, now_s: float) -> None:
        """Everybody of the plan is here and inside: nothing has to be restarted. Else the generation ends."""
        assert self.plan is not None and self._learn_until_s is not None
        complete = len(self.members.active) == len(self.plan.nodes) and self.members.full()
        if complete and all(w.state in ("inside", "finished") for w in self.members.workers()):
            self.phase = "running"
            return self._finish_if_all()
        if now_s >= self._learn_until_s:
            self.phase = "running"
            missing = [n.node for n in self.plan.nodes if self.members.place_of(n.node) is None]
            cause = f"not back after the coordinator was started again: {', '.join(missing) or 'some workers'}"
            self._fault(
                FaultReport(
                    generation=self.generation,
                    worker="",
                    node=missing[0] if missing else "",
                    fault_class="node_loss",
                    detected_by="lease",
                    cause=cause,
                ),
                now_s,
            )
        return None

    def _on_node_left(self, event: m.NodeLeft, now_s: float) -> None:
        place = self.members.place_of(event.node)
        if self._store_node == event.node:
            self._store, self._store_asked = None, False
        for worker in self.members.remove(event.node):
            rank = None if place is None else place * self.members.num_workers + worker.local_rank
            report = FaultReport(
                generation=self.generation,
                worker=worker.id,
                rank=rank,
                node=event.node,
                fault_class="node_loss" if event.lost else "preemption",
                detected_by="lease" if event.lost else "user",
                cause=f"node {event.node} {'is lost' if event.lost else 'left'}",
            )
            self._fault(report, now_s)

    def _on_worker_ready(self, event: m.WorkerReady, now_s: float) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or (worker.state in ("entering", "inside") and event.left != self.generation):
            return
        if self.phase == "running" and worker.state != "starting":
            return
        worker.attached = self._attached_ever = True
        worker.state = "ready"
        worker.inventory = event.inventory

    def _on_worker_entered(self, event: m.WorkerEntered, now_s: float) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or event.generation != self.generation or worker.state != "entering":
            return
        worker.state = "inside"
        if self.phase == "running" and all(w.state != "entering" for w in self.members.workers()):
            self._deadline_s = None
            self._ask_steps()

    def _on_worker_faulted(self, event: m.WorkerFaulted, now_s: float) -> None:
        if event.report.generation == self.generation and self.phase in ("running", "leaving"):
            self._fault(event.report, now_s)

    def _on_worker_exited(self, event: m.WorkerExited, now_s: float) -> None:
        worker = self.members.worker(event.worker)
        if worker is None:
            return
        report = event.report
        if report is None and (not worker.attached or worker.state == "finished"):
            worker.state = "finished"
            self._finish_if_all()
            return
        if report is None:
            report = FaultReport(
                generation=self.generation,
                worker=worker.id,
                node=worker.node,
                fault_class="exit",
                detected_by="waitpid",
                cause="the process ended with exit code 0 in the middle of a generation",
            )
        rank = self.members.rank_of(worker)
        report = report.model_copy(
            update={
                "rank": rank,
                "generation": self.generation,
                "killed_by_us": report.killed_by_us or worker.killed,
            }
        )
        if not worker.attached and not self._attached_ever and now_s - worker.spawned_s > 60.0:
            self.history.no_progress = 0  # a script without `rt.run` shows its progress only by staying alive
        self.members.drop(worker)
        self._replaced = True
        self._fault(report, now_s)

    def _on_worker_finished(self, event: m.WorkerFinished, now_s: float) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or event.generation != self.generation or self.phase != "running":
            return
        worker.state = "finished"
        worker.stopped = event.stopped
        self._finish_if_all()

    def _on_progress(self, event: m.Progress, now_s: float) -> None:
        if event.generation == self.generation and self.phase == "running":
            self._stepped = True
            self.history.progressed(event.step)

    def _on_store_opened(self, event: m.StoreOpened, now_s: float) -> None:
        if event.serial == self._serial and self._store_asked:
            self._store = event.endpoint

    def _on_stop_requested(self, event: m.StopRequested, now_s: float) -> None:
        if self._stop is not None:
            return self._done(event.code, f"stopped at once: {event.cause}")
        self._stop = event
        self._stop_deadline_s = now_s + event.grace_s
        if self.phase == "forming":
            return self._done(event.code, f"stopped by {event.cause}")
        self._ask_steps()
        return None

    def _on_step_at(self, event: m.StepAt, now_s: float) -> None:
        worker = self.members.worker(event.worker)
        if worker is None or event.generation != self.generation:
            return
        worker.step_at = event.step
        workers = self.members.workers()
        if not self.stop_agreed and all(w.step_at is not None for w in workers):
            self.stop_agreed = True
            step = max(w.step_at or 0 for w in workers)
            self._tell(lambda node: m.StopAt(node=node, generation=self.generation, step=step))

    def _on_tick(self, event: m.Tick, now_s: float) -> None:
        if self._stop is not None and now_s >= self._stop_deadline_s:
            return self._done(self._stop.code, f"stopped by {self._stop.cause}; not all ranks were done in time")
        if self._deadline_s is None or now_s < self._deadline_s:
            return None
        self._deadline_s = None
        late = [w for w in self.members.workers() if w.state in ("entering", "inside") and not w.killed]
        if self.phase == "running":
            late = [w for w in late if w.state == "entering"]
        for worker in late:
            what = "enter" if self.phase == "running" else "leave"
            why = f"did not {what} generation {self.generation} within its limit"
            worker.killed = True
            self._out.append(m.Kill(node=worker.node, worker=worker.id, why=why))
            if self.phase == "running":
                self._fault(
                    FaultReport(
                        generation=self.generation,
                        worker=worker.id,
                        rank=self.members.rank_of(worker),
                        node=worker.node,
                        fault_class="hang",
                        detected_by="heartbeat",
                        phase="recovery",
                        cause=why,
                    ),
                    now_s,
                )
        return None

    # --- ending a generation -----------------------------------------------------------------------------------------

    def _fault(self, report: FaultReport, now_s: float) -> None:
        self._reports.append(report)
        if self.phase == "forming":
            return self._fault_while_forming(now_s)
        if self.phase != "running":
            return None
        self.phase = "leaving"
        self._reported_s = now_s
        self._deadline_s = now_s + self.policy.leave_limit(self.plan.world_size if self.plan else 1)
        self._tell(lambda node: m.Leave(node=node, generation=self.generation, why=report.cause or report.fault_class))
        self._ask_store()
        if self.policy.max_restarts > 0 and not report.fatal:
            self._fill_slots(now_s)
        return None

    def _fault_while_forming(self, now_s: float) -> None:
        """A process died on its way to a generation. Where no script has spoken to us, its peers may wait for it."""
        if not self._decide(now_s):
            return
        if not self._attached_ever:
            for worker in self.members.workers():
                if worker.state == "starting" and not worker.killed:
                    worker.killed = True
                    why = "a peer died; a script without rt.run is started anew as a whole"
                    self._out.append(m.Kill(node=worker.node, worker=worker.id, why=why))
            for worker in self.members.workers():
                self.members.drop(worker)
            self._store, self._store_asked = None, False

    def _all_out(self, now_s: float) -> None:
        workers = self.members.workers()
        if any(w.state in ("entering", "inside", "finished") for w in workers):
            return None
        self._out.append(m.AllOut(generation=self.generation))
        self._deadline_s = None
        if self._stop is not None:
            self._decide(now_s)
            return self._done(self._stop.code, f"stopped by {self._stop.cause}; a fault came before the last save")
        if self._decide(now_s):
            self.phase = "forming"
        return None

    def _decide(self, now_s: float) -> bool:
        """Closes the incident; False if it ends the job."""
        root = root_cause(self._reports)
        if self._stepped or not self._incident:
            self._attempts = 0
            self._incident = f"{self.epoch}.{self.generation}"
        self._attempts += 1
        self._stepped = False
        if self._stop is not None:
            decision = Decision("give_up", "a planned stop was under way", self._stop.code)
        else:
            decision = decide(self.policy, self.history, root, replaced=self._replaced)
        self._out.append(
            m.IncidentDecided(
                id=self._incident,
                generation=self.generation,
                root=root,
                secondary=tuple(r for r in self._reports if r is not root),
                rung=decision.rung,
                attempts=self._attempts,
                why=decision.why,
            )
        )
        self._reports = []
        self._replaced = False
        if decision.rung == "give_up" and self._stop is None:
            self._done(decision.code, decision.why)
        return decision.rung != "give_up"

    # --- forming the next one ----------------------------------------------------------------------------------------

    def _form(self, now_s: float) -> None:
        self.members.promote(self._max_nodes)
        if not self._enough(now_s):
            return
        self._ask_store()
        if self._store is None:
            return
        self._fill_slots(now_s)
        workers = self.members.workers()
        if self.members.full() and all(w.state == "ready" for w in workers):
            self._enter(now_s)

    def _enough(self, now_s: float) -> bool:
        """Whether the nodes that are there make a world; waits for more, shrinks, or gives up when the time is over."""
        num_active = len(self.members.active)
        if num_active == self._max_nodes:
            self._short_since_s = None
            return True
        if self.generation == 0 and self.members.num_holes == 0:
            if self._stop is None and num_active >= self._min_nodes:
                return now_s - self._last_join_s >= self.policy.last_call_s
            return False
        if self._short_since_s is None:
            self._short_since_s = now_s
        world = len(self.plan.nodes) if self.plan is not None else self._max_nodes
        if self.members.num_holes == 0 and num_active == world and num_active >= self._min_nodes:
            return True  # a world that has shrunk before goes on as it is
        if now_s - self._short_since_s < self.policy.node_wait_s:
            return False
        if num_active >= self._min_nodes and num_active > 0:
            self.members.close_ranks()
            self._short_since_s = None
            return True
        self._done(80, f"{num_active} of at least {self._min_nodes} nodes after {self.policy.node_wait_s:.0f} s")
        return False

    def _ask_store(self) -> None:
        if not self._store_asked and self.members.active:
            self._serial += 1
            self._store, self._store_asked = None, True
            self._store_node = self.members.active[0].id
            self._out.append(m.OpenStore(node=self._store_node, serial=self._serial))

    def _prefix(self, generation: int) -> str:
        return f"ridethrough/{self.epoch}.{generation}.{self._serial}/"

    def _fill_slots(self, now_s: float) -> None:
        store = self._store or ""
        world_size = len(self.members.active) * self.members.num_workers
        for node in self.members.active:
            index = self.members.place_of(node.id) or 0
            for local_rank, holder in enumerate(node.slots):
                if holder is not None:
                    continue
                self._spawned += 1
                worker = Worker(f"w{self.epoch}-{self._spawned}", node.id, local_rank, now_s)
                self.members.place(worker)
                self._out.append(
                    m.Spawn(
                        node=node.id,
                        worker=worker.id,
                        local_rank=local_rank,
                        rank=index * self.members.num_workers + local_rank,
                        group_rank=index,
                        num_nodes=len(self.members.active),
                        world_size=world_size,
                        store=store,
                        prefix=self._prefix(self.generation + 1),
                        restarts=self.history.restarts,
                    )
                )

    def _enter(self, now_s: float) -> None:
        assert self._store is not None
        self.generation += 1
        n = self.members.num_workers
        nodes = tuple(
            NodeRanks(node=node.id, first_rank=i * n, workers=tuple(w.id for w in node.slots if w is not None))
            for i, node in enumerate(self.members.active)
        )
        plan = Plan(
            epoch=self.epoch,
            generation=self.generation,
            nodes=nodes,
            store=self._store,
            prefix=self._prefix(self.generation),
            restarts=self.history.restarts,
            resume=self._resume(),
            history=self.history.model_copy(deep=True),
        )
        self.plan = plan
        self.phase = "running"
        self._store, self._store_asked = None, False
        self._deadline_s = now_s + self.policy.rebuild_limit_s
        for worker in self.members.workers():
            worker.state, worker.stopped, worker.step_at = "entering", False, None
        self.stop_agreed = False
        self._tell(lambda node: m.Enter(node=node, plan=plan))

    def _resume(self) -> dict[str, Any]:
        return {}

    # --- ending the job ----------------------------------------------------------------------------------------------

    def _ask_steps(self) -> None:
        """Begins to agree on a last step, once everybody is in the generation."""
        if self._stop is None or self.phase != "running":
            return
        workers = self.members.workers()
        if any(w.state == "entering" for w in workers):
            return
        cause = self._stop.cause
        self._tell(lambda node: m.AskStep(node=node, generation=self.generation, cause=cause))

    def _finish_if_all(self) -> None:
        workers = self.members.workers()
        if not self.members.full() or any(w.state != "finished" for w in workers):
            return None
        if self._stop is not None and any(w.stopped for w in workers):
            return self._done(self._stop.code, f"stopped by {self._stop.cause}, state saved")
        return self._done(0, "done")

    def _done(self, code: int, reason: str) -> None:
        self.phase = "done"
        self._out.append(m.JobDone(code=code, reason=reason))

    def _tell(self, action: Callable[[str], m.Action]) -> None:
        self._out.extend(action(node.id) for node in self.members.active)
