"""Whether the nodes that are there make a world: wait for more, go with fewer, or end the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridethrough.generation.membership import Membership
from ridethrough.generation.plan import Plan
from ridethrough.generation.policy import Policy


@dataclass(frozen=True)
class Answer:
    """`why` is for people, with `give_up`."""

    what: Literal["go", "wait", "give_up"]
    why: str = ""


_GO, _WAIT = Answer("go"), Answer("wait")


class Quorum:
    """Between `min_nodes` and `max_nodes` make a world.

    The first one: all, or at least the least number and nobody new for a while. A later one: as many as before; with
    fewer it waits for others, then shrinks by giving up the empty places. With the policy's `majority`, more than half
    of the last plan's nodes have to be there as well.
    """

    def __init__(self, members: Membership, policy: Policy, min_nodes: int, max_nodes: int) -> None:
        self._members, self._policy = members, policy
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self._begun_s: float | None = None
        self._last_join_s = 0.0
        self._short_since_s: float | None = None
        self._num_agreed = 0
        self._last_nodes: frozenset[str] = frozenset()

    def joined(self, now_s: float) -> None:
        self._last_join_s = now_s
        self.passes(now_s)

    def passes(self, now_s: float) -> None:
        """Time begins with the first event."""
        if self._begun_s is None:
            self._begun_s = now_s

    def planned(self, plan: Plan) -> None:
        self._num_agreed = len(plan.nodes)
        self._short_since_s = None
        if self._policy.majority:
            self._last_nodes = frozenset(n.node for n in plan.nodes)

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the last newcomer."""
        return now_s - self._last_join_s

    def ask(self, now_s: float, *, first: bool) -> Answer:
        """`first`: there was no plan yet. May close the ranks over empty places."""
        num = self._members.num_active
        short = num < max(self.min_nodes, 1) or self._members.num_holes > 0 or num < self._num_agreed
        if num >= self.max_nodes and not self._members.num_holes:
            short = False
        elif first and not self._num_agreed and not self._members.num_holes:
            return self._ask_first(num, now_s)
        if not short and self._has_majority():
            self._short_since_s = None
            return _GO
        if self._short_since_s is None:
            self._short_since_s = now_s
        if now_s - self._short_since_s < self._policy.node_wait_s:
            return _WAIT
        if num < max(self.min_nodes, 1):
            return Answer("give_up", f"{num} of at least {self.min_nodes} nodes after {self._policy.node_wait_s:.0f} s")
        if not self._has_majority():
            why = f"no majority of the last plan's {len(self._last_nodes)} nodes after {self._policy.node_wait_s:.0f} s"
            return Answer("give_up", why)
        self._members.close_ranks()
        self._short_since_s, self._num_agreed = None, num
        return _GO

    def _ask_first(self, num: int, now_s: float) -> Answer:
        if num >= self.min_nodes:
            if self.quiet_s(now_s) < self._policy.last_call_s:
                return _WAIT
            self._num_agreed = num  # the last call is over, whoever comes now
            return _GO
        if self._begun_s is None or now_s - self._begun_s < self._policy.join_limit_s:
            return _WAIT
        return Answer("give_up", f"{num} of at least {self.min_nodes} nodes came in {self._policy.join_limit_s:.0f} s")

    def _has_majority(self) -> bool:
        if not self._last_nodes:
            return True
        present = sum(self._members.place_of(node) is not None for node in self._last_nodes)
        return 2 * present > len(self._last_nodes)
