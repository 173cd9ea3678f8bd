"""A coordinator that was started again: what the agents say they are becomes its state."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridethrough.generation import messages as m
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import Plan


@dataclass
class Learned:
    """`alive`: all nodes of the newest plan are in its generation with all of its workers, so training goes on.

    `missing` nodes did not come back, `strangers` have no part in the plan, `strays` (node, worker) are in a
    generation that is over, or beside another one in its slot.
    """

    alive: bool
    attached: bool = False
    missing: list[str] = field(default_factory=list)
    strangers: list[m.NodeRejoined] = field(default_factory=list)
    strays: list[tuple[str, str]] = field(default_factory=list)


class Learner:
    """Collects the nodes of the newest plan that any of them knows. Other events wait, in order, until it is over."""

    def __init__(self, now_s: float, limit_s: float) -> None:
        self._until_s = now_s + limit_s
        self._heard: dict[str, m.NodeRejoined] = {}
        self._plan: Plan | None = None
        self._nodes: frozenset[str] = frozenset()
        self._num_missing = 0
        self.waiting: list[m.Event] = []
        self.highest_generation = 0

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def hear(self, event: m.NodeRejoined) -> None:
        """Takes what a node says of itself; its last word counts."""
        fresh = event.node not in self._heard
        self._heard[event.node] = event
        self.highest_generation = max(self.highest_generation, event.plan.generation)
        newest = self._plan
        if newest is None or (event.plan.epoch, event.plan.generation) > (newest.epoch, newest.generation):
            self._plan = event.plan
            self._nodes = frozenset(n.node for n in event.plan.nodes)
            self._num_missing = len(self._nodes - self._heard.keys())
        elif fresh and event.node in self._nodes:
            self._num_missing -= 1

    def left(self, node: str) -> bool:
        """A node went away while we learned; True if it had been heard."""
        if self._heard.pop(node, None) is None:
            return False
        self._num_missing += node in self._nodes
        return True

    def over(self, now_s: float) -> bool:
        """Every node of the plan is here, or the time is up."""
        return self._num_missing == 0 or now_s >= self._until_s

    def settle(self, members: Membership, now_s: float) -> Learned:
        """Fills the membership with the newest plan's nodes and the workers that can take part in what follows."""
        learned = Learned(alive=True)
        for place, ranks in enumerate(self.plan.nodes):
            event = self._heard.get(ranks.node)
            if event is None:
                learned.alive = False
                learned.missing.append(ranks.node)
                continue
            members.restore(ranks.node, event.name, place)
            current = (event.plan.epoch, event.plan.generation) == (self.plan.epoch, self.plan.generation)
            found, taken = set(), set()
            for snapshot in event.workers:
                within = snapshot.state in ("entering", "inside", "finished")
                over = within and not (current and snapshot.worker in ranks.workers)
                if over or snapshot.local_rank in taken or snapshot.local_rank >= members.num_workers:
                    learned.strays.append((ranks.node, snapshot.worker))
                    continue
                taken.add(snapshot.local_rank)
                members.place(_worker(ranks.node, snapshot, now_s))
                learned.attached |= snapshot.attached
                if within:
                    found.add(snapshot.worker)
            learned.alive = learned.alive and found == set(ranks.workers)
        for event in self._heard.values():
            if event.node not in self._nodes:
                learned.strangers.append(event)
        return learned


def _worker(node: str, snapshot: m.WorkerSnapshot, now_s: float) -> Worker:
    return Worker(snapshot.worker, node, snapshot.local_rank, now_s, state=snapshot.state, attached=snapshot.attached)
