"""A plan: which process holds which rank in one generation. Written once, by the coordinator."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.history import History


class NodeRanks(BaseModel):
    """The ranks of one node: `workers[i]` has local rank i and rank `first_rank + i`."""

    model_config = ConfigDict(frozen=True)

    node: str
    first_rank: int
    workers: tuple[str, ...]


class Plan(BaseModel):
    """One generation's world. Ranks are contiguous over nodes in `nodes` order, and contiguous on each node.

    `store` is host:port of the key-value store for process groups, `prefix` the key prefix that no other generation
    uses. `resume` is opaque to this room (the checkpoint rooms fill it in); `history` is the policy's count so far.
    """

    model_config = ConfigDict(frozen=True)

    epoch: int
    generation: int
    nodes: tuple[NodeRanks, ...]
    store: str
    prefix: str
    restarts: int = 0
    resume: dict[str, Any] = Field(default_factory=dict)
    history: History = Field(default_factory=History)

    @property
    def world_size(self) -> int:
        return sum(len(n.workers) for n in self.nodes)

    def members(self) -> list[tuple[int, int, str, str]]:
        """(rank, local rank, node, worker) of every member, by rank."""
        return [(n.first_rank + i, i, n.node, w) for n in self.nodes for i, w in enumerate(n.workers)]

    def for_node(self, node: str) -> NodeRanks | None:
        return next((n for n in self.nodes if n.node == node), None)

    def group_rank(self, node: str) -> int:
        return next(i for i, n in enumerate(self.nodes) if n.node == node)
