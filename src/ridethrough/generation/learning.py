"""A coordinator that was started again: what the agents say they are becomes its state."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridethrough.generation import messages as m
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import NodePlan, Plan


@dataclass
class Learned:
    """`alive`: all nodes of the newest plan are in its generation with all of its workers, so training goes on.

    The nodes of the `missing` places did not come back, `strangers` have no part in the plan, `strays` (node, worker)
    are in a generation that is over, or beside another one in its slot.
    """

    alive: bool
    missing: list[int] = field(default_factory=list)
    strangers: list[m.NodeRejoined] = field(default_factory=list)
    strays: list[tuple[str, str]] = field(default_factory=list)


class Learner:
    """Collects the nodes of the newest plan that any of them knows. Other events wait, in order, until it is over.

    Each node knows its own part of a plan only. One whose last part is of an older plan keeps its place if nobody
    tells of that place in the newest one: it was not told of it before the coordinator ended.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None
        self._newest: NodePlan | None = None
        self._heard: dict[str, m.NodeRejoined] = {}
        self._seats: dict[int, m.NodeRejoined] = {}
        self.waiting: list[m.Event] = []

    @property
    def highest_generation(self) -> int:
        return max((event.plan.generation for event in self._heard.values()), default=0)

    def plan(self) -> Plan | None:
        """The newest one, as far as its nodes are here; None if nobody has told of any."""
        if self._newest is None:
            return None
        return Plan.from_parts(self._newest, {e.node: e.plan for e in self._heard.values() if self._is_newest(e)})

    def hear(self, event: m.NodeRejoined) -> None:
        """Takes what a node says of itself; its last word counts."""
        self.forget(event.node)
        self._heard[event.node] = event
        if self._newest is None or event.plan.key > self._newest.key:
            self._newest = event.plan
            self._seats = {}
            for heard in self._heard.values():
                self._seat(heard)
        else:
            self._seat(event)

    def over(self, now_s: float) -> bool:
        """Every node of the plan is here, or the time is up, which begins with the first call."""
        if self._until_s is None:
            self._until_s = now_s + self._limit_s
        complete = self._newest is not None and len(self._seats) == self._newest.num_nodes
        return complete or now_s >= self._until_s

    def forget(self, node: str) -> None:
        """The node is gone again."""
        before = self._heard.pop(node, None)
        if before is not None and self._seats.get(before.plan.place) is before:
            del self._seats[before.plan.place]

    def settle(self, members: Membership, plan: Plan, now_s: float) -> Learned:
        """Fills the membership with the newest plan's nodes and the workers that can take part in what follows."""
        learned = Learned(alive=True)
        for place, ranks in enumerate(plan.nodes):
            event = self._seats.get(place)
            if event is None:
                learned.alive = False
                learned.missing.append(place)
                continue
            node = event.node
            members.restore(node, event.name, place)
            found, taken = set(), set()
            for snapshot in event.workers:
                within = snapshot.state in ("entering", "inside", "finished")
                over = within and not (self._is_newest(event) and snapshot.worker in ranks.workers)
                if over or snapshot.local_rank in taken or snapshot.local_rank >= members.num_workers:
                    learned.strays.append((node, snapshot.worker))
                    continue
                taken.add(snapshot.local_rank)
                members.place(_worker(node, snapshot, now_s))
                if within:
                    found.add(snapshot.worker)
            learned.alive = learned.alive and bool(ranks.workers) and found == set(ranks.workers)
        seated = {event.node for event in self._seats.values()}
        learned.strangers = [event for node, event in self._heard.items() if node not in seated]
        return learned

    def _is_newest(self, event: m.NodeRejoined) -> bool:
        return self._newest is not None and event.plan.key == self._newest.key

    def _seat(self, event: m.NodeRejoined) -> None:
        holder = self._seats.get(event.plan.place)
        if (
            self._newest is not None
            and event.plan.place < self._newest.num_nodes
            and (holder is None or holder.plan.key < event.plan.key)
        ):
            self._seats[event.plan.place] = event


def _worker(node: str, snapshot: m.WorkerSnapshot, now_s: float) -> Worker:
    return Worker(snapshot.worker, node, snapshot.local_rank, now_s, state=snapshot.state, attached=snapshot.attached)
