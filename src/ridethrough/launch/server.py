"""The coordinator's server: agents connect, prove themselves, and are members as long as they are heard of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from typing import Any

from ridethrough.generation import handshake
from ridethrough.generation import messages as m
from ridethrough.generation.leases import Leases
from ridethrough.generation.wire import WireError
from ridethrough.launch.channel import Channel
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.outbox import Inbox, Outbox

_LOOK_S = 0.1
_BROKEN_REST_S = 1.5  # a broken connection is no death: an agent that lives comes back in this time


class CoordinatorServer:
    """Carries messages between a `Coordinator` and the agents of other processes. One event loop, one thread."""

    def __init__(self, coordinator: Coordinator, token: str, welcome: dict[str, Any], lease_s: float) -> None:
        self._coordinator = coordinator
        self._token = token
        self._welcome = welcome
        self._leases = Leases(lease_s)
        self._agents: dict[str, Channel] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._dismissed: set[str] = set()  # told that the job is over for them: they may close
        self._gone = asyncio.Event()

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, listening: socket.socket | None = None
    ) -> int:
        """Listens, or serves a socket that does; returns the port. Raises OSError if it is taken."""
        if listening is not None:
            self._server = await asyncio.start_server(self._serve, sock=listening, ssl=tls)
        else:
            self._server = await asyncio.start_server(self._serve, host, port, ssl=tls)
        self._tasks.add(asyncio.ensure_future(self._look()))
        return int(self._server.sockets[0].getsockname()[1])

    def deliver(self, node: str, action: m.Action) -> None:
        """Sends an action to a node, now or when it is connected again; its lease decides how long that may take."""
        if isinstance(action, m.JobDone):
            self._dismissed.add(node)
        outbox = self._outboxes.setdefault(node, Outbox())
        message = outbox.add({"t": "action", "action": action.model_dump(mode="json")})
        channel = self._agents.get(node)
        if channel is not None:
            channel.send(message)

    async def stop(self, done: m.JobDone, limit_s: float) -> None:
        """Tells every agent that the job is over, and waits until they have closed, or `limit_s` is over."""
        for node in list(self._agents):
            self.deliver(node, done)
        end_s = time.monotonic() + limit_s
        with contextlib.suppress(asyncio.TimeoutError):
            while self._agents:
                self._gone.clear()
                await asyncio.wait_for(self._gone.wait(), end_s - time.monotonic())
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        node = ""
        try:
            node = await self._admit(channel)
            if not node:
                return
            self._agents[node] = channel
            inbox = self._inboxes[node]
            while (message := await channel.receive()) is not None:
                self._leases.heard(node, time.monotonic())
                if message.get("t") == "event" and inbox.fresh(message):
                    self._coordinator.post(m.event_adapter.validate_python(message["event"]))
        except handshake.Refused as error:
            print(f"ridethrough coordinator: refused {writer.get_extra_info('peername')}: {error}", file=sys.stderr)
            channel.send({"t": "refused", "why": str(error)})
        except (ConnectionError, WireError, LookupError, ValueError, OSError, asyncio.TimeoutError) as error:
            print(f"ridethrough coordinator: connection of {node or 'a stranger'} broke: {error}", file=sys.stderr)
        finally:
            if node and self._agents.get(node) is channel:
                del self._agents[node]
                self._leases.shorten(node, time.monotonic(), _BROKEN_REST_S)
                self._gone.set()
            await channel.close()

    async def _admit(self, channel: Channel) -> str:
        asked = handshake.challenge()
        channel.send(asked)
        answered = await channel.introduce()
        if answered.get("t") == "bye":  # it only wanted to know whether a coordinator is here
            return ""
        channel.send(handshake.prove(self._token, asked, answered))
        channel.send({"t": "welcome", **self._welcome})
        hello = await channel.receive(5.0)
        if hello is None or hello.get("t") != "hello":
            raise ConnectionError("no hello came")
        if hello.get("num_workers") != self._welcome["num_workers"]:
            raise handshake.Refused(
                f"--nproc-per-node is {hello.get('num_workers')} on {hello.get('name')} and "
                f"{self._welcome['num_workers']} at the coordinator: give the same everywhere"
            )
        node = str(hello["node"])
        known = hello.get("epoch") == self._welcome["epoch"] and node in self._inboxes
        if not known:
            self._inboxes[node], self._outboxes[node] = Inbox(), Outbox()
        self._leases.heard(node, time.monotonic())
        channel.send({"t": "resume", "known": known, "heard": self._inboxes[node].last})
        for message in self._outboxes[node].after(int(hello["heard"]) if known else 0):
            channel.send(message)
        return node

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for node in self._leases.lost(time.monotonic()):
                if node in self._dismissed:
                    self._dismissed.discard(node)
                else:
                    print(f"ridethrough coordinator: node {node} was not heard of, it is lost", file=sys.stderr)
                channel = self._agents.pop(node, None)
                if channel is not None:
                    await channel.close()
                self._inboxes.pop(node, None)
                self._outboxes.pop(node, None)
                self._gone.set()
                self._coordinator.post(m.NodeLeft(node=node, lost=True))
