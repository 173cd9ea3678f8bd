"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

_UCRED = struct.Struct("3i")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, from the kernel."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def is_ours(sock: socket.socket) -> bool:
    """Whether the peer is a process of our own user: nobody else is heard."""
    return peer_credentials(sock)[1] == os.getuid()
