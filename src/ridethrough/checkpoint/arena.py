"""Snapshot memory of this process: anonymous shared memory (memfd, never /dev/shm) that the keeper maps too.

Arenas outlive generations: the pool is the process's own, and the next generation's snapshots go into the
same memory if they fit. An arena is `free`, or `busy` from the moment a snapshot is started in it until the
keeper has given it back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import torch

from ridethrough.checkpoint import marks
from ridethrough.checkpoint.errors import CheckpointError

_names = iter(range(1, 1 << 62))


class Arena:
    """`nbytes` of shared memory at `address`, the last page of them for marks. `primed` is the layout whose constant
    bytes are in place; `serial` counts the snapshots made in it, and is what the marks hold."""

    def __init__(self, nbytes: int) -> None:
        self.id = f"{os.getpid()}-{next(_names)}"
        self.nbytes = nbytes
        self.serial = 0
        self.fd = os.memfd_create(f"ridethrough-{self.id}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.busy = False
        self.primed = ""
        self.views: dict[Any, torch.Tensor] = {}  # places of tensors, made once
        self.batches: dict[int, Any] = {}  # what is copied by one call, by the plan's list of it
        self.sent_to = -1  # serial of the keeper connection that has it
        self.pinned = False  # registered with CUDA
        self.pin_asked = False
        self.pinning = threading.Event()  # set once that is done or refused

    def bytes_tensor(self) -> torch.Tensor:
        """All of the arena as one uint8 tensor that shares its memory."""
        return torch.frombuffer(self.map, dtype=torch.uint8)

    def forget(self) -> None:
        """Let go of the tensors that were copied here."""
        self.views.clear()
        self.batches.clear()

    def close(self) -> None:
        if self.pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.address)
        self.forget()
        os.close(self.fd)
        self.fd = -1


class Pool:
    """The arenas of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: dict[str, Arena] = {}
        self.dropped: list[str] = []  # ids that the keeper should forget

    def acquire(self, nbytes: int, limit: int) -> Arena | None:
        """A free arena for `nbytes` and its marks, marked busy; None when `limit` of them are busy. Raises
        CheckpointError when the memory for a new one is not there."""
        nbytes += marks.MARK_BYTES
        with self._lock:
            fits = [a for a in self._arenas.values() if not a.busy and nbytes <= a.nbytes <= max(4 * nbytes, 1 << 20)]
            if fits:
                best = min(fits, key=lambda a: (not a.pinned, a.nbytes))
                return _begun(best)
            for arena in [a for a in self._arenas.values() if not a.busy]:
                del self._arenas[arena.id]
                self.dropped.append(arena.id)
                arena.close()
            if sum(1 for a in self._arenas.values() if a.busy) >= limit:
                return None
            check_budget(nbytes)
            try:
                arena = Arena(nbytes)
            except OSError as error:
                raise CheckpointError(f"no memory for a snapshot of {nbytes} bytes: {error}") from error
            self._arenas[arena.id] = arena
            return _begun(arena)

    def reserve(self, nbytes: int, count: int) -> list[Arena]:
        """Make arenas ahead of need, so that `count` of this size are there; returns those that are free."""
        taken = [arena for _ in range(count) if (arena := self.acquire(nbytes, count)) is not None]
        for arena in taken:
            arena.busy = False
        return taken

    def release(self, arena_id: str, serial: int) -> None:
        """Snapshot `serial` in the arena is not needed any more; a later one that has begun there stays."""
        with self._lock:
            arena = self._arenas.get(arena_id)
            if arena is not None and arena.serial == serial:
                arena.busy = False

    def get(self, arena_id: str) -> Arena | None:
        with self._lock:
            return self._arenas.get(arena_id)

    def forget(self) -> None:
        """No arena keeps a tensor of a generation that is over."""
        with self._lock:
            for arena in self._arenas.values():
                arena.batches.clear()

    def bytes_held(self) -> int:
        with self._lock:
            return sum(a.nbytes for a in self._arenas.values())

    def num_busy(self) -> int:
        with self._lock:
            return sum(1 for a in self._arenas.values() if a.busy)

    def all_pinned(self) -> bool:
        """Whether there are arenas, and all are registered with CUDA."""
        with self._lock:
            return bool(self._arenas) and all(a.pinned for a in self._arenas.values())

    def take_dropped(self) -> list[str]:
        with self._lock:
            gone, self.dropped = self.dropped, []
            return gone


def _begun(arena: Arena) -> Arena:
    arena.busy = True
    arena.serial += 1
    marks.begin(arena.map, arena.serial)
    return arena


def available_bytes() -> tuple[int, str]:
    """Memory that can still be had, and who limits it: the cgroup (v2) or the machine."""
    with open("/proc/meminfo") as file:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    best, who = info.get("MemAvailable", 1 << 62), "the machine"
    try:
        group = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].split("::")[-1]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        while True:
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text())
                reclaimable = sum(
                    int(line.split()[1])
                    for line in (folder / "memory.stat").read_text().splitlines()
                    if line.startswith("inactive_file ")
                )
                free = int(text) - used + reclaimable
                if free < best:
                    best, who = free, f"cgroup {folder}"
            if folder == Path("/sys/fs/cgroup"):
                break
            folder = folder.parent
    except (OSError, ValueError, IndexError):
        pass
    return best, who


def check_budget(nbytes: int) -> None:
    """Raise CheckpointError with the numbers when a new arena would not fit."""
    free, who = available_bytes()
    if nbytes > free:
        raise CheckpointError(
            f"a snapshot needs {nbytes} bytes of host memory and {who} has {free} left; "
            'lower `slots`, use mode="sync", or give the job more memory'
        )


POOL = Pool()
