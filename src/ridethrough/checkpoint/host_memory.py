"""How much of the host's memory a keeper's snapshots take: its workers' arenas, their tails, and replicas."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

_BLOCK_BYTES = 512  # the unit of st_blocks, stat(2)


class Mapped(Protocol):
    """Shared memory that this process has mapped; its descriptors are open as long as it is."""

    @property
    def files(self) -> tuple[int, ...]: ...


_alive: weakref.WeakSet[Mapped] = weakref.WeakSet()
_lock = threading.Lock()


def count(mapped: Mapped) -> None:
    """From now on `total_bytes` has it, until nothing refers to it any more."""
    with _lock:
        _alive.add(mapped)


def total_bytes() -> int:
    """Bytes of the pages that exist: an arena that is reserved and was never written takes none. Any thread."""
    with _lock:
        alive = list(_alive)
    return sum(os.fstat(fd).st_blocks * _BLOCK_BYTES for mapped in alive for fd in mapped.files)
