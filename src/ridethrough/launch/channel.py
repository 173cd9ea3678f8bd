"""A framed JSON connection on asyncio streams, with limits on every wait and on what a stranger may send."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ridethrough.generation.wire import Decoder, WireError, encode

_STRANGER_BYTES = 4096
_HANDSHAKE_LIMIT_S = 5.0


class Channel:
    """`receive` and `send` for one connection; used by one task at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = Decoder()
        self._inbox: list[dict[str, Any]] = []

    async def receive(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None when the other end has closed. Raises asyncio.TimeoutError, WireError, OSError."""
        while not self._inbox:
            data = await asyncio.wait_for(self._reader.read(1 << 16), limit_s)
            if not data:
                return None
            self._inbox += self._decoder.feed(data)
        return self._inbox.pop(0)

    async def introduce(self) -> dict[str, Any]:
        """A message of the handshake: small and soon. Raises ConnectionError."""
        try:
            head = await asyncio.wait_for(self._reader.readexactly(4), _HANDSHAKE_LIMIT_S)
            if int.from_bytes(head, "big") > _STRANGER_BYTES:
                raise WireError("the first message is too long for one of ours")
            body = await asyncio.wait_for(self._reader.readexactly(int.from_bytes(head, "big")), _HANDSHAKE_LIMIT_S)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            raise ConnectionError("no handshake came") from error
        return self._decoder.feed(head + body)[0]

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message; never blocks. Nothing happens on a closed connection: its reader notices."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    @property
    def local_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
