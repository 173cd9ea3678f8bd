"""The worker's connection to its node's agent: a Unix socket, framed JSON, one reader, several senders."""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

from ridethrough.generation.messages import PROTOCOL
from ridethrough.generation.wire import Decoder, encode

_SEND_LIMIT_S = 5.0


class Link:
    """`send` from any thread; `receive` only from the monitor thread."""

    def __init__(self, path: str, worker: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(_SEND_LIMIT_S)
        try:
            self._sock.connect(path)
        except OSError as error:
            raise ConnectionError(f"the node's agent does not answer at {path}: {error}") from error
        self._lock = threading.Lock()
        self._decoder = Decoder()
        self.send({"t": "hello", "worker": worker, "pid": os.getpid(), "protocol": PROTOCOL})

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the agent is gone."""
        with self._lock:
            self._sock.sendall(encode(message))

    def receive(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Messages that came within `timeout_s`, perhaps none; None when the agent is gone."""
        ready, _, _ = select.select([self._sock], [], [], timeout_s)
        if not ready:
            return []
        try:
            data = self._sock.recv(1 << 20)
        except OSError:
            return None
        return self._decoder.feed(data) if data else None

    def close(self) -> None:
        self._sock.close()
