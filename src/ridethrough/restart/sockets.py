"""Finds the TCP sockets that a process group opens in this process, and shuts them down.

Gloo has no abort that frees a peer which is blocked in a collective: only a closed connection does. Its sockets are the
difference between this process's TCP sockets before and after a group is made.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

_LISTEN = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """One TCP socket of this process. `inode` tells whether the descriptor still is the same socket."""

    inode: int
    fd: int
    local_port: int
    remote_port: int
    listening: bool


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
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inode = int(link[8:-1])
            if inode in table:
                found[inode] = TcpSocket(inode, int(name), *table[inode])
    return found


def shut_down(sockets: list[TcpSocket]) -> int:
    """Shuts the sockets down without closing their descriptors, which belong to somebody else; returns how many.

    A descriptor that has become another file meanwhile is left alone. Any thread.
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
