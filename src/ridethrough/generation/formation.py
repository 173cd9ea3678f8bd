"""Gets the next world together: its store, its processes, its plan."""

from __future__ import annotations

from ridethrough.generation import messages as m
from ridethrough.generation.history import History
from ridethrough.generation.membership import Membership, Worker
from ridethrough.generation.plan import NodeRanks, Plan
from ridethrough.generation.policy import Policy
from ridethrough.generation.store_request import StoreRequest


class Formation:
    """Names processes and key prefixes so that none comes twice, whatever coordinators there were."""

    def __init__(self, members: Membership, policy: Policy, epoch: int) -> None:
        self._members = members
        self._epoch = epoch
        self._num_spawned = 0
        self.store = StoreRequest(members, policy.store_limit_s, epoch)

    def spawn(self, now_s: float, *, generation: int, restarts: int) -> list[m.Spawn]:
        """A process for each empty slot; the ranks are what the plan of `generation` is expected to say."""
        members = self._members
        out = []
        for node, local_rank in list(members.free_slots()):
            self._num_spawned += 1
            worker = Worker(f"w{self._epoch}-{self._num_spawned}", node.id, local_rank, now_s)
            members.place(worker)
            place = node.place or 0
            out.append(
                m.Spawn(
                    node=node.id,
                    worker=worker.id,
                    local_rank=local_rank,
                    rank=place * members.num_workers + local_rank,
                    group_rank=place,
                    num_nodes=members.num_active,
                    world_size=members.num_active * members.num_workers,
                    store=self.store.endpoint or "",
                    prefix=self._prefix(generation),
                    restarts=restarts,
                )
            )
        return out

    def plan(self, generation: int, history: History) -> Plan:
        """The world as it stands: every slot has a worker, and the store is open, which goes with this plan."""
        endpoint = self.store.endpoint
        assert endpoint is not None
        size = self._members.num_workers
        nodes = tuple(
            NodeRanks(node=node.id, first_rank=place * size, workers=tuple(w.id for w in node.slots if w is not None))
            for place, node in enumerate(self._members.active)
        )
        plan = Plan(
            epoch=self._epoch,
            generation=generation,
            nodes=nodes,
            store=endpoint,
            prefix=self._prefix(generation),
            restarts=history.restarts,
            resume={} if history.older_than is None else {"older_than": history.older_than},
            history=history.model_copy(deep=True),
        )
        self.store.taken()
        return plan

    def _prefix(self, generation: int) -> str:
        return f"ridethrough/{self._epoch}.{generation}.{self.store.serial}/"
