"""How the ranks of a generation agree about checkpoints: through the process group's store, never by a
collective.

A few small keys at start, at load, and when the layout changes; every wait has a limit. World size 1 needs no
store. Called on the training thread, alike on all ranks.
"""

from __future__ import annotations

import json
import socket
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout

_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Peers:
    """`rank` and `world_size` of the default process group, and a corner of its store of our own."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.world_size = 0, 1
        self.store: Any = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            store = _get_default_store()
            self.prefix = f"ridethrough/checkpoint/{_count(store)}/"
            self.store = store

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(self.prefix + key, json.dumps(value))

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
        if self.rank == 0:
            self.publish(key, value)
            return value
        return self.read(key, timeout_s)

    def gather(self, key: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Every rank's value, in rank order, on every rank: rank 0 collects and publishes the list."""
        if self.store is None:
            return [value]
        if self.rank != 0:
            self.publish(f"{key}/{self.rank}", value)
            return list(self.read(f"{key}/all", timeout_s))
        values = [value] + [self.read(f"{key}/{rank}", timeout_s) for rank in range(1, self.world_size)]
        self.publish(f"{key}/all", values)
        return values


def _count(store: Any) -> int:
    """How many Peers this process has made on this store: alike on all ranks as long as all make them in the
    same order."""
    _made[store] = _made.get(store, 0) + 1
    return _made[store]


def host_identity() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise CheckpointError(f"cannot tell this host from others: {error}") from error
    return f"{socket.gethostname()}/{boot}"
