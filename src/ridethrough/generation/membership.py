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
    """The nodes in the order in which they hold ranks; standby nodes behind them."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.active: list[Node] = []
        self.standby: list[Node] = []
        self._workers: dict[str, Worker] = {}

    def add(self, node: str, name: str) -> None:
        if not any(n.id == node for n in self.active + self.standby):
            self.standby.append(Node(node, name, [None] * self.num_workers))

    def remove(self, node: str) -> list[Worker]:
        """Forgets a node; returns the workers that it took along."""
        gone = [w for n in self.active + self.standby if n.id == node for w in n.slots if w is not None]
        self.active = [n for n in self.active if n.id != node]
        self.standby = [n for n in self.standby if n.id != node]
        for worker in gone:
            self._workers.pop(worker.id, None)
        return gone

    def promote(self, limit: int) -> None:
        """Standby nodes become active ones, in the order of their arrival, until `limit` nodes are active."""
        while self.standby and len(self.active) < limit:
            self.active.append(self.standby.pop(0))

    def place(self, worker: Worker) -> None:
        node = self.node(worker.node)
        assert node is not None and node.slots[worker.local_rank] is None
        node.slots[worker.local_rank] = worker
        self._workers[worker.id] = worker

    def drop(self, worker: Worker) -> None:
        self._workers.pop(worker.id, None)
        node = self.node(worker.node)
        if node is not None and node.slots[worker.local_rank] is worker:
            node.slots[worker.local_rank] = None

    def node(self, node: str) -> Node | None:
        return next((n for n in self.active + self.standby if n.id == node), None)

    def worker(self, worker: str) -> Worker | None:
        return self._workers.get(worker)

    def workers(self) -> list[Worker]:
        """Every worker of the active nodes, by rank."""
        return [w for n in self.active for w in n.slots if w is not None]

    def full(self) -> bool:
        return bool(self.active) and all(w is not None for n in self.active for w in n.slots)

    def rank_of(self, worker: Worker) -> int:
        index = next(i for i, n in enumerate(self.active) if n.id == worker.node)
        return index * self.num_workers + worker.local_rank
