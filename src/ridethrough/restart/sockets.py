"""Finds the TCP sockets that belong to this process's gloo groups, and ends them.

Gloo has no abort that frees a rank which is blocked in a collective: only the end of its connections does. Each group
has an event loop of its own, an epoll instance that watches the group's listener and its connections to the members,
and the kernel lists what an epoll instance watches. So exactly gloo's connections are found, also those still being
made or made later, and no other socket (a tracker's, a store's) that happens to be opened at the same time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

_LISTEN = "0A"
_EPOLL = "anon_inode:[eventpoll]"


@dataclass(frozen=True)
class TcpSocket:
    """One TCP socket of this process. `inode` tells whether the descriptor still is the same socket."""

    inode: int
    fd: int
    local_port: int
    remote_port: int
    listening: bool


@dataclass(frozen=True)
class GlooLoop:
    """A group's event loop: the epoll descriptor, and the inode of the listener that it watches."""

    fd: int
    listener: int


def tcp_sockets() -> dict[int, TcpSocket]:
    """This process's TCP sockets by inode. Any thread."""
    table: dict[int, tuple[int, int, bool]] = {}
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(path) as file:
                next(file)
                for line in file:
                    columns = line.split()
                    local, remote = (int(columns[i].rsplit(":", 1)[1], 16) for i in (1, 2))
                    table[int(columns[9])] = (local, remote, columns[3] == _LISTEN)
        except FileNotFoundError:
            continue
    found = {}
    for fd, link in _descriptors():
        if link.startswith("socket:["):
            inode = int(link[8:-1])
            if inode in table:
                found[inode] = TcpSocket(inode, fd, *table[inode])
    return found


def event_loops() -> set[int]:
    """Descriptors of this process's epoll instances. Any thread."""
    return {fd for fd, link in _descriptors() if link == _EPOLL}


def gloo_loops(before: set[int]) -> list[GlooLoop]:
    """The epoll instances that are not in `before` and watch a listening TCP socket. Any thread."""
    fresh = event_loops() - before
    if not fresh:
        return []
    listeners = {s.inode for s in tcp_sockets().values() if s.listening}
    loops = []
    for fd in sorted(fresh):
        watched = _watched(fd)
        loops += [GlooLoop(fd, inode) for inode in watched if inode in listeners]
    return loops


def connections(loops: Iterable[GlooLoop]) -> list[TcpSocket]:
    """The connections that the loops watch now (ports left out); a loop whose descriptor has become something else has
    none. Does not ask for the table of all connections: a read of it may miss some while others come and go."""
    found = []
    for loop in loops:
        watched = _watched(loop.fd)
        if loop.listener in watched:
            for inode, fd in watched.items():
                if inode != loop.listener and _link(fd) == f"socket:[{inode}]":
                    found.append(TcpSocket(inode, fd, 0, 0, False))
    return found


def shut_down(sockets: Iterable[TcpSocket]) -> int:
    """Shuts the sockets down without closing their descriptors, which belong to somebody else; returns how many. A
    descriptor that has become another file meanwhile is left alone. Any thread."""
    count = 0
    for duplicate in _duplicates(sockets).values():
        with duplicate, contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def stop_receiving(sockets: Iterable[TcpSocket]) -> dict[int, socket.socket]:
    """Ends gloo's streams on this side alone: it reads the end, wakes who waits and closes its descriptors. Returns a
    duplicate of each by inode, to be held until the peers have come out too. Any thread.

    The peers must not see the end before they end their own side. A write that meets a closed connection is queued by
    gloo, and `Pair::signalException` wakes nobody who waits for a queued send (`UnboundBuffer::waitSend`): that rank
    would stay for the whole timeout of its group.
    """
    held = _duplicates(sockets)
    for duplicate in held.values():
        with contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RD)
    return held


def _duplicates(sockets: Iterable[TcpSocket]) -> dict[int, socket.socket]:
    """By inode; descriptors that are no longer these sockets are left out."""
    found = {}
    for entry in sockets:
        try:
            duplicate = os.dup(entry.fd)
        except OSError:
            continue
        if os.fstat(duplicate).st_ino == entry.inode:
            found[entry.inode] = socket.socket(fileno=duplicate)
        else:
            os.close(duplicate)
    return found


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue
    return found


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _watched(epoll: int) -> dict[int, int]:
    """Inode -> descriptor of what an epoll instance watches: lines `tfd: 16 events: 19 ... ino:11894 sdev:9` (hex)."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            lines = [line for line in file if line.startswith("tfd:")]
    except OSError:
        return {}
    return {int(line.rpartition("ino:")[2].split()[0], 16): int(line.split()[1]) for line in lines if "ino:" in line}
