"""A rank's snapshot on its way to another node: a header, then the image and the tail in hashed chunks."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import xxhash

from ridethrough.checkpoint import host_memory, marks, wire
from ridethrough.checkpoint.kept import Kept

CHUNK_BYTES = 4 << 20
_HASH_BYTES = 16


class Replica:
    """A share that came over the wire, in memory of this keeper; verified when it was received."""

    finite = True
    alone: bool

    def __init__(self, header: dict[str, Any]) -> None:
        self.arena_id, self.serial = f"replica-{os.getpid()}-{id(self)}", 1
        self.nbytes, self.tail_bytes = header["nbytes"], header["tail_bytes"]
        self.entries, self.alone = header["entries"], header["alone"]
        self.size = self.nbytes + marks.MARK_BYTES
        self.arena_fd, self.map = _memory("ridethrough-replica", self.size)
        self.tail_fd, self.tail = _memory("ridethrough-tail", max(1, self.tail_bytes))
        host_memory.count(self)

    @property
    def files(self) -> tuple[int, ...]:
        return self.descriptors

    def seal(self) -> None:
        marks.begin(self.map, self.serial)
        marks.end(self.map, self.serial)
        marks.fence(self.map, self.serial)

    def buffers(self) -> list[memoryview]:
        return [memoryview(self.map)[: self.nbytes], memoryview(self.tail)[: self.tail_bytes]]

    def counts(self) -> bool:
        return True

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.arena_fd, self.tail_fd

    def __del__(self) -> None:
        for name in ("arena_fd", "tail_fd"):
            if getattr(self, name, -1) >= 0:
                os.close(getattr(self, name))


def _memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


def send(sock: socket.socket, share: Kept | Replica, about: dict[str, Any], pace: Callable[[int], None]) -> int:
    """Stream a share; returns the bytes sent. `pace(n)` is called after each chunk, and may wait. Raises OSError."""
    names = ("nbytes", "tail_bytes", "entries", "alone")
    wire.send_message(sock, {**about, **{name: getattr(share, name) for name in names}})
    total = 0
    for buffer in share.buffers():
        for start in range(0, len(buffer), CHUNK_BYTES):
            chunk = buffer[start : start + CHUNK_BYTES]
            sock.sendall(xxhash.xxh3_128_digest(chunk))
            sock.sendall(chunk)
            total += len(chunk)
            pace(len(chunk))
    return total


def receive(sock: socket.socket, header: dict[str, Any]) -> Replica:
    """The share that follows a header. Raises OSError when the stream ends or a chunk differs from its hash."""
    replica = Replica(header)
    for buffer in replica.buffers():
        for start in range(0, len(buffer), CHUNK_BYTES):
            chunk = buffer[start : start + CHUNK_BYTES]
            said = bytearray(_HASH_BYTES)
            _fill(sock, memoryview(said))
            _fill(sock, chunk)
            if xxhash.xxh3_128_digest(chunk) != said:
                raise OSError("a chunk of a replica differs from its hash")
    replica.seal()
    return replica


def _fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:])
        if count == 0:
            raise OSError("the other keeper closed the connection")
        done += count


class Pace:
    """Sleeps so that no more than `bytes_per_s` go out; 0: as fast as the link."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.began, self.sent = bytes_per_s, time.monotonic(), 0

    def __call__(self, count: int) -> None:
        self.sent += count
        if self.bytes_per_s:
            time.sleep(max(0.0, self.began + self.sent / self.bytes_per_s - time.monotonic()))
