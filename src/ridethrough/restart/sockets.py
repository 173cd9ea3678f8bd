"""Finds the TCP sockets that belong to this process's gloo groups, and shuts them down.

Gloo has no abort that frees a peer which is blocked in a collective: only a closed connection does. Each gloo group has
an event loop of its own, an epoll instance that watches the group's listener and its connections to the members, and
the kernel lists what an epoll instance watches. So exactly gloo's connections are found, also those still being made or
made later, and no other socket (a tracker's, a store's) that happens to be opened at the same time.
"""

from __future__ import annotations

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
    """Shuts the sockets down without closing their descriptors, which belong to somebody else; returns how many.

    A descriptor that has become another file meanwhile is left alone. Any thread. A rank may stay in gloo's
    `UnboundBuffer::waitSend` although all its connections are closed: a send that meets the close is not woken (4 to 7
    of 800 ranks on a machine at a load of 20; to shut only the receiving direction does not help). The limit of leaving
    ends it.
    """
    count = 0
    for entry in sockets:
        try:
            duplicate = os.dup(entry.fd)
        except OSError:
            continue
        if os.fstat(duplicate).st_ino != entry.inode:
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
            except OSError:
                continue
    return count


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
