"""Messages between a worker and its keeper: four bytes of length, JSON, and file descriptors beside it.

No pickle crosses this socket. A message's descriptors travel with its first byte, so a reader that takes
exactly one message at a time never mixes them up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 1 << 30
_HEADER = struct.Struct("!I")


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. The caller holds the socket's lock. Raises OSError when the peer is gone."""
    body = json.dumps(message, separators=(",", ":")).encode()
    data = _HEADER.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Block for one message and its descriptors (owned by the caller); None at the end of the stream."""
    header = b""
    fds: list[int] = []
    while len(header) < _HEADER.size:
        data, more, _flags, _addr = socket.recv_fds(sock, _HEADER.size - len(header), 16)
        fds += more
        if not data:
            _close_all(fds)
            return None
        header += data
    (size,) = _HEADER.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        _close_all(fds)
        raise ValueError(f"message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")
    body = bytearray(size)
    view = memoryview(body)
    got = 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            _close_all(fds)
            return None
        got += n
    message = json.loads(body)
    if not isinstance(message, dict):
        _close_all(fds)
        raise ValueError("message is not an object")
    return message, fds


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
