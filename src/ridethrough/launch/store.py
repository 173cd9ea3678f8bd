"""The key-value store for process groups, hosted by the agent and never by a rank."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from ridethrough.launch import ports

_PORT_WAIT_S = 8.0
_PAUSE_S = 0.25


class StoreError(RuntimeError):
    """One line with the port and what holds it."""


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

    async def open_patiently(self) -> str:
        """As `open`; a port that is taken is waited for a little. Raises StoreError, which names the holder."""
        for _ in range(round(_PORT_WAIT_S / _PAUSE_S)):
            try:
                return self.open()
            except (RuntimeError, OSError) as error:
                if not self._port or self._servers:
                    raise StoreError(f"no store at {self.address}: {str(error).splitlines()[0]}") from error
                await asyncio.sleep(_PAUSE_S)
        raise StoreError(f"port {self._port} of {self.address} is in use by {ports.holder(self._port)}")

    def close(self) -> None:
        self._servers.clear()
