"""The key-value store for process groups, hosted by the agent and never by a rank."""

from __future__ import annotations

import datetime
from typing import Any


class StoreHost:
    """Opens a fresh TCPStore server for each generation and keeps the last two: a rank that is late in leaving may
    still talk to the old one. Called by the agent's main thread."""

    def __init__(self, address: str, port: int = 0) -> None:
        self.address = address
        self._port = port
        self._servers: list[Any] = []

    def open(self) -> str:
        """Returns host:port of the new server. Raises OSError if the port is taken."""
        import torch.distributed as dist

        server = dist.TCPStore(
            self.address,
            self._port if not self._servers else 0,
            None,
            is_master=True,
            timeout=datetime.timedelta(seconds=60),
            wait_for_workers=False,
        )
        self._servers = [*self._servers[-1:], server]
        return f"{self.address}:{server.port}"

    def close(self) -> None:
        self._servers.clear()
