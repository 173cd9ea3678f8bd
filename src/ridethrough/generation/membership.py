"""Who takes part: nodes, their slots, and the worker process that holds each slot at present."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

WorkerState = Literal["starting", "ready", "entering", "inside", "finished"]


@dataclass
class Worker:
    """One worker process. `attached` once it has spoken to its agent, that is, once its script uses `rt.run`."""

    id: str
    node: str
    local_rank: int
    spawned_s: float
    state: WorkerState = "starting"
    attached: bool = False
    stopped: bool = False
    step_at: int | None = None
    killed: bool = False
    inventory: dict[str, Any] = field(default_factory=dict)


@dataclass
class Node:
    """One agent's incarnation, with a slot per rank that it can hold."""

    id: str
    name: str
    slots: list[Worker | None]


class Membership:
    """Places in the world, in the order of ranks, and the nodes that hold them; standby nodes wait behind.

    A lost node leaves its place empty, so that a newcomer gets the same ranks and nobody else's change.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.standby: list[Node] = []
        self._places: list[Node | None] = []
        self._nodes: dict[str, Node] = {}
        self._workers: dict[str, Worker] = {}

    @property
    def active(self) -> list[Node]:
        return [n for n in self._places if n is not None]

    @property
    def num_holes(self) -> int:
        return sum(n is None for n in self._places)

    def add(self, node: str, name: str) -> bool:
        """A newcomer waits as a standby; False if it is known already."""
        if node in self._nodes:
            return False
        self._nodes[node] = Node(node, name, [None] * self.num_workers)
        self.standby.append(self._nodes[node])
        return True

    def restore(self, node: str, name: str, place: int) -> Node:
        """A node that held a place in a plan of an earlier coordinator takes it again."""
        self._places.extend([None] * (place + 1 - len(self._places)))
        self._nodes[node] = self._places[place] = Node(node, name, [None] * self.num_workers)
        return self._nodes[node]

    def remove(self, node: str) -> list[Worker]:
        """Forgets a node; returns the workers that it took along."""
        found = self._nodes.pop(node, None)
        if found is None:
            return []
        gone = [w for w in found.slots if w is not None]
        self._places = [None if n is found else n for n in self._places]
        self.standby = [n for n in self.standby if n is not found]
        for worker in gone:
            self._workers.pop(worker.id, None)
        return gone

    def promote(self, limit: int) -> None:
        """Standby nodes take empty places, then new ones, until `limit` nodes are active."""
        while self.standby and len(self.active) < limit:
            node = self.standby.pop(0)
            if None in self._places:
                self._places[self._places.index(None)] = node
            else:
                self._places.append(node)

    def close_ranks(self) -> None:
        """The empty places are given up: ranks become contiguous over those who are there."""
        self._places = [n for n in self._places if n is not None]

    def place(self, worker: Worker) -> None:
        node = self._nodes[worker.node]
        assert node.slots[worker.local_rank] is None
        node.slots[worker.local_rank] = worker
        self._workers[worker.id] = worker

    def drop(self, worker: Worker) -> None:
        self._workers.pop(worker.id, None)
        node = self._nodes.get(worker.node)
        if node is not None and node.slots[worker.local_rank] is worker:
            node.slots[worker.local_rank] = None

    def worker(self, worker: str) -> Worker | None:
        return self._workers.get(worker)

    def workers(self) -> list[Worker]:
        """Every worker of the active nodes, by rank."""
        return [w for n in self.active for w in n.slots if w is not None]

    def full(self) -> bool:
        return bool(self._places) and all(n is not None and None not in n.slots for n in self._places)

    def place_of(self, node: str) -> int | None:
        """The node's index among the places; None for a standby or a stranger."""
        found = self._nodes.get(node)
        return next((i for i, n in enumerate(self._places) if n is not None and n is found), None)

    def rank_of(self, worker: Worker) -> int | None:
        place = self.place_of(worker.node)
        return None if place is None else place * self.num_workers + worker.local_rank
