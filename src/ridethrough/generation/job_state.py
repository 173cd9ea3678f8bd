"""What the parts of the generation machine share: the job's state, and the few ways to speak and to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.formation import Formation
from ridethrough.generation.history import History
from ridethrough.generation.incident import Incident
from ridethrough.generation.learning import Learner
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import Plan
from ridethrough.generation.planned import PlannedEnd
from ridethrough.generation.policy import Policy
from ridethrough.generation.quorum import Quorum

Phase = Literal["learning", "forming", "running", "leaving", "done"]


class JobState:
    """The lowest layer of `GenerationMachine`, which documents the arguments."""

    def __init__(
        self,
        *,
        num_workers: int,
        min_nodes: int = 1,
        max_nodes: int = 1,
        policy: Policy | None = None,
        epoch: int = 0,
        earlier: int = 0,
    ) -> None:
        self.policy = policy or Policy()
        self.history = History()
        self.members = Membership(num_workers)
        self.phase: Phase = "learning" if earlier else "forming"
        self.generation = 0
        self.plan: Plan | None = None
        self.epoch = epoch
        self._quorum = Quorum(self.members, self.policy, min_nodes, max_nodes)
        self._formation = Formation(self.members, self.policy, epoch)
        self._incident = Incident()
        self._learner = Learner(self.policy.learn_limit_s)
        self._planned: PlannedEnd | None = None
        self._noticed: dict[str, str] = {}
        self._unfit: dict[str, str] = {}
        self._killed: dict[str, float] = {}
        self._deadline_s: float | None = None
        self._check_starts_s = 0.0
        self._entered_s = 0.0
        self._attached_ever = earlier > 0
        self._highest = earlier
        self._now_s = 0.0
        self._out: list[m.Action] = []

    def _kill(self, worker: Worker, why: str) -> None:
        if not worker.killed:
            worker.killed = True
            self._killed[worker.id] = self._now_s
            self._out.append(m.Kill(node=worker.node, worker=worker.id, why=why))

    def _ask_store(self) -> None:
        request = self._formation.store.ask(self._now_s)
        if request is not None:
            self._out.append(request)

    def _rebuild_limit(self) -> float:
        world_size = self.members.num_active * self.members.num_workers
        return self.policy.rebuild_limit(world_size, self.history.longest_rebuild_s)

    def _done(self, code: int, reason: str) -> None:
        self.phase = "done"
        self._out += self._incident.settle("give_up" if code == ExitCode.RESTARTS_EXHAUSTED else None)
        self._out.append(m.JobDone(code=code, reason=reason))

    def _tell(self, action: Callable[[str], m.Action]) -> None:
        self._out.extend(action(node.id) for node in self.members.active)
