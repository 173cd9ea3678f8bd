"""The keeper's view of its workers: connections, the arenas they have shared, and the snapshots in them."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from typing import Any

from ridethrough.checkpoint import host_memory, marks, wire
from ridethrough.generation.peer import peer_credentials


class Shared:
    """A worker's memfd, mapped read-only. Stays for as long as anything refers to it, whatever becomes of the
    worker."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        try:
            self.map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(fd)
            self.fd = -1
            raise
        host_memory.count(self)

    @property
    def files(self) -> tuple[int, ...]:
        return (self.fd,)

    def view(self, size: int) -> memoryview:
        return memoryview(self.map)[:size]

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class Client:
    """One connected worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock: socket.socket | None = sock
        self.pid = peer_credentials(sock)[0] if sock.family == socket.AF_UNIX else 0
        self.lock = threading.Lock()
        self.arenas: dict[str, Shared] = {}
        self.layouts: dict[str, list[dict[str, Any]]] = {}
        self.waiting: set[Kept] = set()  # landed, and to be persisted once the worker says so
        self.holds: dict[tuple[str, str, int], Kept] = {}  # the same, by (root, lineage, sequence)

    @property
    def gone(self) -> bool:
        return self.sock is None

    def dying(self) -> bool:
        """Its process has ended, and what it said last has not all been read yet."""
        if self.gone:
            return False
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError:
            return True

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Tell the worker; it may be gone, which is no concern of the write."""
        with self.lock:
            if self.sock is not None:
                try:
                    wire.send_message(self.sock, message, fds)
                except OSError:
                    pass


class Kept:
    """One rank's landed snapshot: its image in a shared arena, its small values in a tail, and what lies where.
    `uses` says who needs it; with the last one the arena goes back to its worker."""

    def __init__(self, client: Client, message: dict[str, Any], tail: Shared | None) -> None:
        self.client = client
        self.arena_id, self.serial = message["arena"], message["serial"]
        self.arena = client.arenas[self.arena_id]
        self.tail = tail
        self.nbytes, self.tail_bytes = message["bytes"], message["tail_bytes"]
        self.layout = message["layout"]
        self.entries: list[dict[str, Any]] = client.layouts[self.layout] + message["entries"]
        self.finite: bool = message["finite"]
        self.good: bool = self.finite and not message["suspect"]
        self.alone: bool = message["alone"]
        self.proven: bool = message["proven"]
        self.uses: set[str] = set()

    def counts(self) -> bool:
        """Whether it is a true snapshot: whole, and fenced. A process that ended before its fence has written
        nothing after the copy, if its fences are known to work."""
        if marks.fenced(self.arena.map, self.serial):
            return True
        return self.client.gone and self.proven and marks.whole(self.arena.map, self.serial)

    def landed(self) -> bool:
        """Whether it is whole, and of the step that it says if fences work: they wait for the copy. Enough to write it
        to storage when there is no time left, not to give up an older one for it."""
        return self.counts() or (self.proven and marks.whole(self.arena.map, self.serial))

    def buffers(self) -> list[memoryview]:
        """In file order: the image, then the small values."""
        found = [self.arena.view(self.nbytes)]
        if self.tail is not None:
            found.append(self.tail.view(self.tail_bytes))
        return found

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.arena.fd, *((self.tail.fd,) if self.tail is not None else ()))

    @property
    def size(self) -> int:
        return self.arena.size

    def drop(self, use: str) -> None:
        """One use less. The caller holds the keeper's lock."""
        if use not in self.uses:
            return
        self.uses.discard(use)
        if not self.uses:
            self.client.waiting.discard(self)
            self.client.send({"ev": "free", "arena": self.arena_id, "serial": self.serial})
