"""A plan: which process holds which rank in one generation. Written once, by the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.history import History


class NodeRanks(BaseModel):
    """The ranks of one node: `workers[i]` has local rank i and rank `first_rank + i`."""

    model_config = ConfigDict(frozen=True)

    node: str
    first_rank: int
    workers: tuple[str, ...]


class _Generation(BaseModel):
    """What a plan and each node's part of it have in common.

    `store` is host:port of the key-value store for process groups, `prefix` the key prefix that no other generation
    uses. `resume` is opaque to this room (the checkpoint rooms fill it in); `history` is the policy's count so far.
    """

    model_config = ConfigDict(frozen=True)

    epoch: int
    generation: int
    store: str
    prefix: str
    restarts: int = 0
    resume: dict[str, Any] = Field(default_factory=dict)
    history: History = Field(default_factory=History)


class NodePlan(_Generation):
    """A node's part of a plan: who holds its ranks, and what all have in common. `place` is its index in the plan's
    nodes. A plan for 10,000 nodes has a megabyte; a part of it a few hundred bytes."""

    world_size: int
    num_nodes: int
    place: int
    first_rank: int
    workers: tuple[str, ...]

    @property
    def key(self) -> tuple[int, int]:
        """Which plan it is a part of; a later one's is higher."""
        return self.epoch, self.generation


class Plan(_Generation):
    """One generation's world. Ranks are contiguous over nodes in `nodes` order, and contiguous on each node."""

    nodes: tuple[NodeRanks, ...]

    @property
    def world_size(self) -> int:
        return sum(len(n.workers) for n in self.nodes)

    def members(self) -> list[tuple[int, int, str, str]]:
        """(rank, local rank, node, worker) of every member, by rank."""
        return [(n.first_rank + i, i, n.node, w) for n in self.nodes for i, w in enumerate(n.workers)]

    def parts(self) -> list[NodePlan]:
        """What each node is told, in the order of `nodes`."""
        header = self.model_dump(include=set(NodePlan.model_fields) - {"history"})
        header.update(world_size=self.world_size, num_nodes=len(self.nodes), history=self.history)
        return [
            NodePlan(place=place, first_rank=ranks.first_rank, workers=ranks.workers, **header)
            for place, ranks in enumerate(self.nodes)
        ]

    @classmethod
    def from_parts(cls, some: NodePlan, parts: Mapping[str, NodePlan]) -> Plan:
        """The plan again, from what its nodes were told; a place that nobody tells of has an empty name and nobody.
        `some` is any part of it."""
        size = some.world_size // some.num_nodes
        nodes = [NodeRanks(node="", first_rank=place * size, workers=()) for place in range(some.num_nodes)]
        for node, part in parts.items():
            nodes[part.place] = NodeRanks(node=node, first_rank=part.first_rank, workers=part.workers)
        header = some.model_dump(include=set(cls.model_fields) & set(NodePlan.model_fields) - {"history"})
        return cls(nodes=tuple(nodes), history=some.history, **header)
