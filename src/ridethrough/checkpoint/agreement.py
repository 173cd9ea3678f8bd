"""Which version the nodes keep, and which they replicate next: pure, on the keeper of rank 0's node.

Every node reports which versions are complete on its own ranks, and the newest one that it has sent to its neighbour.
The *base* is the newest version that all nodes have and, with replicas, that all have sent: losing a node does not
lose it. All replicate the same version, `following`; when every node has sent it, it is the base, and the newest
one that all have is next. So a node's loss costs at most the steps that one replication takes, and one more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridethrough.checkpoint.held import NOTHING, Key


@dataclass
class Agreement:
    """Of one generation of one root. `num_nodes` report; `replicas` is 0 or 1."""

    num_nodes: int
    replicas: int
    complete: dict[int, set[Key]] = field(default_factory=dict)
    sent: dict[int, Key] = field(default_factory=dict)
    base: Key = NOTHING
    following: Key = NOTHING
    common: Key = NOTHING

    def report(self, node: int, complete: list[Key], sent: Key) -> dict[str, Any]:
        """What a node says; the answer is what it should keep: `base`, `following`, and everything from `common`
        on."""
        self.complete[node] = set(complete)
        self.sent[node] = max(sent, self.sent.get(node, NOTHING))
        if len(self.complete) == self.num_nodes:
            everywhere = set.intersection(*self.complete.values())
            self.common = max([self.common, *everywhere])
            if not self.replicas:
                self.base = self.common
            else:
                self._follow(everywhere)
        return {"base": list(self.base), "following": list(self.following), "common": list(self.common)}

    def _follow(self, everywhere: set[Key]) -> None:
        arrived = self.following != NOTHING and all(sent >= self.following for sent in self.sent.values())
        if arrived:
            self.base = self.following
        if arrived or self.following == NOTHING or self.following not in everywhere:
            newer = [key for key in everywhere if key > self.base]
            self.following = max(newer, default=NOTHING if arrived else self.following)
