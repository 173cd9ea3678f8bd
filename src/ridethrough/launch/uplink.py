"""The agent's connection to a coordinator elsewhere: made again, by name, whenever it breaks."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ridethrough.generation import handshake
from ridethrough.generation import messages as m
from ridethrough.generation.wire import WireError
from ridethrough.launch.channel import Channel
from ridethrough.launch.outbox import Inbox, Outbox
from ridethrough.launch.tls import TlsFiles, is_refusal

BEAT_S = 1.0
_PATIENCE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Uplink:
    """Sends events, receives actions, beats once a second. What is sent without connection goes out after the next
    one is made. One event loop, one thread.

    `on_welcome(welcome, address)` comes first: the coordinator's words and the address by which this host reaches it.
    `hello()` then says what this agent is; `on_unknown()` is called when the coordinator does not know this agent (a
    first connection, a new coordinator, or a lease that has ended); `on_action` takes the actions.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        tls: TlsFiles | None = None,
        on_welcome: Callable[[dict[str, Any], str], None],
        hello: Callable[[], dict[str, Any]],
        on_unknown: Callable[[], None],
        on_action: Callable[[m.Action], None],
    ) -> None:
        self._token = token
        self._tls = tls.client() if tls is not None else None
        self._on_welcome, self._hello = on_welcome, hello
        self._on_unknown, self._on_action = on_unknown, on_action
        self._channel: Channel | None = None
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._epoch = -1
        self.lost_since_s: float | None = time.monotonic()
        self._told = False
        self.refused = ""
        self.trouble = "not tried yet"
        self.endpoint = (host, port)

    def send(self, event: m.Event) -> None:
        """Sends an event now, or after the next connection."""
        message = self._outbox.add({"t": "event", "event": event.model_dump(mode="json")})
        if self._channel is not None:
            self._channel.send(message)

    async def run(self) -> None:
        """Until cancelled, or until the coordinator refuses this agent (`refused` says why)."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._session()
                pause_s = _FIRST_PAUSE_S
            except handshake.Refused as error:
                self.refused = str(error)
                return
            except (OSError, WireError, LookupError, asyncio.TimeoutError) as error:
                self.trouble = str(error) or type(error).__name__
                if is_refusal(error):
                    self.refused = f"no TLS with the coordinator, is its certificate of the same --tls-ca? {error}"
                    return
                self._say_once()
            if self.lost_since_s is None:
                self.lost_since_s = time.monotonic()
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    def _say_once(self) -> None:
        """A connection that broke is told at once, one that does not come at the start after a while."""
        if self.lost_since_s is None or (not self._told and time.monotonic() - self.lost_since_s > _PATIENCE_S):
            self._told = True
            host, port = self.endpoint
            print(f"ridethrough: the coordinator at {host}:{port} is not reachable: {self.trouble}", file=sys.stderr)

    async def _session(self) -> None:
        # The name is resolved anew at each attempt: behind it may be another pod than a minute ago.
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(*self.endpoint, family=socket.AF_UNSPEC, ssl=self._tls), 5.0
        )
        channel = Channel(reader, writer)
        beat: asyncio.Task[None] | None = None
        try:
            asked = await channel.introduce()
            answered = handshake.answer(self._token, asked)
            channel.send(answered)
            handshake.check_proof(self._token, asked, answered, await channel.introduce())
            welcome = await channel.receive(5.0)
            if welcome is None or welcome.get("t") != "welcome":
                raise ConnectionError("the coordinator did not welcome this agent")
            if welcome["epoch"] < self._epoch:
                raise ConnectionError(f"a coordinator of epoch {welcome['epoch']} is older than {self._epoch}")
            self._on_welcome(welcome, channel.local_address)
            channel.send({"t": "hello", "epoch": self._epoch, "heard": self._inbox.last, **self._hello()})
            resume = await channel.receive(5.0)
            if resume is not None and resume.get("t") == "refused":
                raise handshake.Refused(str(resume["why"]))
            if resume is None or resume.get("t") != "resume":
                raise ConnectionError("the coordinator did not take this agent up")
            self._epoch = welcome["epoch"]
            self._channel = channel
            self.lost_since_s = None
            self._told = False
            if resume["known"]:
                for message in self._outbox.after(resume["heard"]):
                    channel.send(message)
            else:
                self._outbox.clear()
                self._inbox = Inbox()
                self._on_unknown()
            beat = asyncio.ensure_future(self._beat(channel))
            while (received := await channel.receive()) is not None:
                if received.get("t") == "action" and self._inbox.fresh(received):
                    self._on_action(m.action_adapter.validate_python(received["action"]))
        finally:
            self._channel = None
            if beat is not None:
                beat.cancel()
            await channel.close()

    async def _beat(self, channel: Channel) -> None:
        while True:
            channel.send({"t": "beat"})
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
