"""How the ranks of a generation agree about checkpoints: through the process group's store, never by a
collective.

A few small keys at start, at load, and when the layout changes; every wait has a limit, and no key is used twice, so
that nothing stale is ever read. World size 1 needs no store. Called on the training thread, alike on all ranks.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout

_T = TypeVar("_T")


@dataclass
class Failure:
    """The class of what was raised, and its text with the rank."""

    kind: str
    text: str


class Peers:
    """`rank` and `world_size` of the default process group, and a corner of its store of our own."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.world_size = 0, 1
        self.store: Any = None
        self._turn = 0
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            self.store = _get_default_store()
            # Counted in the store, which may outlive this process group.
            number = self.store.add(f"ridethrough/checkpoint/{self.rank}", 1)
            self.prefix = f"ridethrough/checkpoint/{number}/"

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(self.prefix + key, json.dumps(value))

    def is_published(self, key: str) -> bool:
        """Whether any rank has published this key. Does not wait. False where the store has ended with its rank."""
        try:
            return self.store is not None and bool(self.store.check([self.prefix + key]))
        except RuntimeError:  # torch's DistNetworkError and its like
            return False

    def read(self, key: str, timeout_s: float | None = None) -> Any:
        """Wait for a key that a peer publishes. Raises CheckpointTimeout."""
        name = self.prefix + key
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            self.store.wait([name], timedelta(seconds=limit))
        except dist.DistStoreError as error:
            if "imeout" not in str(error) and "imed out" not in str(error):
                raise
            raise CheckpointTimeout(f"rank {self.rank}: no {key!r} from a peer within {limit:g} s") from error
        return json.loads(self.store.get(name))

    def from_rank0(self, key: str, value: Any, timeout_s: float | None = None) -> Any:
        """Rank 0 publishes `value`, everybody returns it."""
        if self.store is None:
            return value
        key = self._numbered(key)
        if self.rank == 0:
            self.publish(key, value)
            return value
        return self.read(key, timeout_s)

    def gather(self, key: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Every rank's value, in rank order, on every rank: rank 0 collects and publishes the list."""
        if self.store is None:
            return [value]
        key = self._numbered(key)
        if self.rank != 0:
            self.publish(f"{key}/{self.rank}", value)
            return list(self.read(f"{key}/all", timeout_s))
        values = [value] + [self.read(f"{key}/{rank}", timeout_s) for rank in range(1, self.world_size)]
        self.publish(f"{key}/all", values)
        return values

    def together(
        self, key: str, call: Callable[[], _T], errors: tuple[type[Exception], ...]
    ) -> tuple[_T | None, Failure | None]:
        """What the call gives here, and how it failed on the first rank on which it did, if on any."""
        result, mine = None, None
        try:
            result = call()
        except errors as error:
            mine = [type(error).__name__, f"rank {self.rank}: {error}"]
        first = next((outcome for outcome in self.gather(key, mine) if outcome is not None), None)
        return result, Failure(*first) if first is not None else None

    def _numbered(self, key: str) -> str:
        self._turn += 1
        return f"{self._turn}/{key}"


def host_identity() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise CheckpointError(f"cannot tell this host from others: {error}") from error
    return f"{socket.gethostname()}/{boot}"
