"""From the end of one generation to the next plan: wait until all are out, fill the world up, enter."""

from __future__ import annotations

from ridethrough.generation import messages as m
from ridethrough.generation.ending import Ending
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.planned import PlannedEnd


class Forming(Ending):
    """A script that never calls `rt.run` stays in `forming`: a death there starts all of its processes anew."""

    def _all_out(self) -> None:
        counts = self.members.counts
        if counts["entering"] or counts["inside"] or counts["finished"]:
            if self.policy.max_restarts and not self._incident.fatal:
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
            self._replace_unfit()
            self.phase = "forming"

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
        if self.plan is None:
            self.members.seat_as_wished()
        self._ask_store()
        if self._formation.store.hopeless:
            return self._done(ExitCode.RESTARTS_EXHAUSTED, "no node could open a store for the process groups")
        if self._formation.store.endpoint is None:
            return None
        self._spawn()
        if self._attached_ever and counts["finished"]:
            return self._recall_plain()
        if self.members.all_in("ready") and not self._killed:
            self._enter()
        return None

    def _enough(self) -> bool:
        answer = self._quorum.ask(self._now_s, first=self.plan is None)
        if answer.what == "give_up":
            self._done(ExitCode.RESTARTS_EXHAUSTED, answer.why)
        elif answer.what == "wait" and self._planned is not None and self._planned.code is not None:
            self._done(self._planned.code, f"stopped by {self._planned.cause}; too few nodes for a last save")
        return answer.what == "go"

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
        for ranks, part in zip(plan.nodes, plan.parts(), strict=True):
            self._out.append(m.Enter(node=ranks.node, plan=part))

    # --- processes on their way ---------------------------------------------------------------------------------------

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

    # --- growing ------------------------------------------------------------------------------------------------------

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
