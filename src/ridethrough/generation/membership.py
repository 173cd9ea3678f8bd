"""Who takes part: nodes, their slots, and the worker process that holds each slot at present.

Every question that the machine asks at each event is answered from counters, whatever the size of the world. Only
giving up empty places, and what goes through all nodes in order, costs as much as there are nodes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

WorkerState = Literal["starting", "ready", "entering", "inside", "finished"]


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process; its state is changed by `Membership.move` alone.

    `attached` once it has spoken to its agent, that is, once its script uses `rt.run`. `exited`: the process is gone,
    with exit code 0 and after its work. `step` is its answer for a planned end,
    `done_step` the last one when it had finished.
    """

    id: str
    node: str
    local_rank: int
    spawned_s: float
    state: WorkerState = "starting"
    attached: bool = False
    stopped: bool = False
    step: int | None = None
    killed: bool = False
    exited: bool = False
    done_step: int = 0
    inventory: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Node:
    """One agent's incarnation, with a slot per rank that it can hold. `place` is None for a standby, `wish` the place
    that it would like to have."""

    id: str
    name: str
    slots: list[Worker | None]
    place: int | None = None
    wish: int | None = None


class Membership:
    """Places in the world, in the order of ranks, and the nodes that hold them; standby nodes wait behind.

    A lost node leaves its place empty, so that a newcomer gets the same ranks and nobody else's change. Only nodes
    with a place have workers.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.counts: dict[WorkerState, int] = dict.fromkeys(get_args(WorkerState), 0)
        self._places: list[Node | None] = []
        self._holes: list[int] = []
        self._standby: OrderedDict[str, Node] = OrderedDict()
        self._nodes: dict[str, Node] = {}
        self._workers: dict[str, Worker] = {}
        self._unfilled: dict[str, Node] = {}

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def active(self) -> list[Node]:
        """The nodes with a place, in the order of ranks. Goes through all of them."""
        return [n for n in self._places if n is not None]

    @property
    def standby(self) -> list[Node]:
        return list(self._standby.values())

    @property
    def num_active(self) -> int:
        return len(self._places) - len(self._holes)

    @property
    def num_standby(self) -> int:
        return len(self._standby)

    @property
    def num_holes(self) -> int:
        return len(self._holes)

    def knows(self, node: str) -> bool:
        return node in self._nodes

    def name_of(self, node: str) -> str:
        found = self._nodes.get(node)
        return "" if found is None else found.name

    def worker(self, worker: str) -> Worker | None:
        return self._workers.get(worker)

    def workers(self) -> list[Worker]:
        """Every worker by rank. Goes through all of them."""
        return [w for n in self.active for w in n.slots if w is not None]

    def full(self) -> bool:
        """Every place has a node, and every slot of it a worker."""
        return bool(self._places) and not self._holes and not self._unfilled

    def all_in(self, *states: WorkerState) -> bool:
        """The world is full, and every worker is in one of these states."""
        return self.full() and sum(self.counts[s] for s in states) == len(self._workers)

    def place_of(self, node: str) -> int | None:
        """The node's index among the places; None for a standby or a stranger."""
        found = self._nodes.get(node)
        return None if found is None else found.place

    def rank_of(self, worker: Worker) -> int | None:
        place = self.place_of(worker.node)
        return None if place is None else place * self.num_workers + worker.local_rank

    def nth_active(self, index: int) -> Node:
        """A node with a place, counted round and round, without going through all of them."""
        holes = sorted(self._holes)
        place = index % self.num_active
        for hole in holes:
            place += hole <= place
        node = self._places[place]
        assert node is not None
        return node

    def free_slots(self) -> Iterator[tuple[Node, int]]:
        """Slots without a worker, by rank; goes through the nodes that have some."""
        if not self._unfilled:
            return  # going through a dict that was large once costs as much as when it was
        for node in sorted(self._unfilled.values(), key=lambda n: n.place or 0):
            for local_rank, holder in enumerate(node.slots):
                if holder is None:
                    yield node, local_rank

    # --- changes -----------------------------------------------------------------------------------------------------

    def add(self, node: str, name: str, wish: int | None = None) -> bool:
        """A newcomer waits as a standby; False if it is known already."""
        if node in self._nodes:
            return False
        self._nodes[node] = self._standby[node] = Node(node, name, [None] * self.num_workers, wish=wish)
        return True

    def restore(self, node: str, name: str, place: int) -> None:
        """A node that held a place in a plan of an earlier coordinator takes it again."""
        for empty in range(len(self._places), place + 1):
            self._places.append(None)
            heapq.heappush(self._holes, empty)
        self.add(node, name)
        self._sit(self._standby.pop(node), place)
        self._holes.remove(place)
        heapq.heapify(self._holes)

    def remove(self, node: str) -> list[Worker]:
        """Forgets a node; returns the workers that it took along."""
        found = self._nodes.pop(node, None)
        if found is None:
            return []
        self._standby.pop(node, None)
        self._unfilled.pop(node, None)
        gone = [w for w in found.slots if w is not None]
        for worker in gone:
            self.counts[worker.state] -= 1
            del self._workers[worker.id]
        if found.place is not None:
            self._places[found.place] = None
            heapq.heappush(self._holes, found.place)
        return gone

    def promote(self, limit: int) -> bool:
        """Standby nodes take empty places, then new ones, until `limit` nodes have one. True if somebody did."""
        changed = False
        while self._standby and self.num_active < limit:
            _, node = self._standby.popitem(last=False)
            if node.wish is not None and node.wish in self._holes:
                place = node.wish
                self._holes.remove(place)
                heapq.heapify(self._holes)
            elif self._holes:
                place = heapq.heappop(self._holes)
            else:
                place = len(self._places)
                self._places.append(None)
            self._sit(node, place)
            changed = True
        return changed

    def seat_as_wished(self) -> None:
        """Before anybody has a process: those with a wish in its order, the others behind them as they came."""
        if self._workers or self._holes or all(n is None or n.wish is None for n in self._places):
            return
        self._places.sort(key=lambda n: (1, 0) if n is None or n.wish is None else (0, n.wish))
        for place, node in enumerate(self._places):
            assert node is not None
            node.place = place

    def close_ranks(self) -> None:
        """The empty places are given up: ranks become contiguous over those who are there."""
        self._places = [n for n in self._places if n is not None]
        self._holes = []
        for place, node in enumerate(self._places):
            assert node is not None
            node.place = place

    def place(self, worker: Worker) -> None:
        """Puts a worker into its empty slot."""
        node = self._nodes[worker.node]
        assert node.place is not None and node.slots[worker.local_rank] is None
        node.slots[worker.local_rank] = worker
        self._workers[worker.id] = worker
        self.counts[worker.state] += 1
        if None not in node.slots:
            self._unfilled.pop(node.id, None)

    def drop(self, worker: Worker) -> None:
        """The worker is no member any more; its slot is empty."""
        if self._workers.pop(worker.id, None) is None:
            return
        self.counts[worker.state] -= 1
        node = self._nodes[worker.node]
        node.slots[worker.local_rank] = None
        self._unfilled[node.id] = node

    def move(self, worker: Worker, state: WorkerState) -> None:
        self.counts[worker.state] -= 1
        self.counts[state] += 1
        worker.state = state

    def _sit(self, node: Node, place: int) -> None:
        node.place = place
        self._places[place] = node
        if None in node.slots:
            self._unfilled[node.id] = node
