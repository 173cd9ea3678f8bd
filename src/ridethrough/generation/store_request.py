"""Asking a node for the next generation's store, and another one if it does not come."""

from __future__ import annotations

from ridethrough.generation.membership import Membership
from ridethrough.generation.messages import OpenStore

_ROUNDS = 3
_SERIALS_PER_EPOCH = 1_000_000


class StoreRequest:
    """One store per plan. `endpoint` is set once it listens."""

    def __init__(self, members: Membership, limit_s: float, epoch: int) -> None:
        self._members, self._limit_s = members, limit_s
        self.serial = epoch * _SERIALS_PER_EPOCH  # an answer to an earlier coordinator's request is not ours
        self.endpoint: str | None = None
        self._node = ""
        self._asked_s: float | None = None
        self._num_tries = 0

    def ask(self, now_s: float) -> OpenStore | None:
        """The request to be sent, if one is due: none is under way, or the last one has taken too long."""
        if self.endpoint is not None or not self._members.num_active:
            return None
        if self._asked_s is not None:
            if now_s - self._asked_s < self._limit_s:
                return None
            self._num_tries += 1
        self.serial += 1
        self._asked_s = now_s
        self._node = self._members.nth_active(self._num_tries).id
        return OpenStore(node=self._node, serial=self.serial)

    @property
    def hopeless(self) -> bool:
        """Every node, or ten of them, was asked several times."""
        return self._num_tries >= _ROUNDS * min(max(self._members.num_active, 1), 10)

    def opened(self, serial: int, endpoint: str) -> None:
        if serial == self.serial and self._asked_s is not None and self.endpoint is None:
            self.endpoint = endpoint

    def lost(self, node: str) -> None:
        """The node is gone, and what it hosted or was asked for with it."""
        if node == self._node:
            self._forget()

    def taken(self) -> None:
        """A plan names the store, or it is not to be used: the next one will be another."""
        self._num_tries = 0
        self._forget()

    def _forget(self) -> None:
        self._node, self.endpoint, self._asked_s = "", None, None
