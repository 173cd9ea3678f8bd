"""Keepers of several nodes: they agree on versions, send each other replicas, and fetch what a lost node held.

Over their own TCP connections, opened by the job's token on both sides. Threads: `rt-neighbours` accepts, `rt-peer-*`
serves one connection, `rt-agree` reports to the keeper of rank 0's node, `rt-replicate` sends. None of them is ever
waited for by a worker, except for what a load fetches.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridethrough.checkpoint import held, replica, wire
from ridethrough.checkpoint.agreement import Agreement
from ridethrough.generation import handshake

if TYPE_CHECKING:
    from ridethrough.checkpoint.keeping import Keeping

REPORT_S = 0.02  # times the number of nodes over ten, if that is more
LIMIT_S = 20.0
FAMILY_SIZE = 64


class Neighbours:
    """`address` is this node's own for its peers; `endpoint` what they connect to."""

    def __init__(self, keeping: Keeping, address: str, token: str, replicas: int, bytes_per_s: float) -> None:
        self.keeping, self.token, self.replicas, self.bytes_per_s = keeping, token, replicas, bytes_per_s
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.server = _listen(address, family, keeping.path.with_suffix(".port"))
        self.endpoint = f"{address}:{self.server.getsockname()[1]}"
        self.agreements: dict[tuple[str, str], Agreement] = {}
        self.group: dict[str, Any] | None = None  # of the newest generation
        self.following: held.Key = held.NOTHING
        self.sent: held.Key = held.NOTHING
        self.bytes_sent = 0
        self.seconds: float | None = None  # of the last replication
        self.changed = threading.Condition()
        self.links: dict[str, tuple[str, socket.socket]] = {}  # thread -> endpoint and connection
        for name, call in (("neighbours", self._accept), ("agree", self._agree), ("replicate", self._replicate)):
            threading.Thread(target=call, name=f"rt-{name}", daemon=True).start()

    def join(self, group: dict[str, Any]) -> None:
        """A generation begins: `group` has the endpoints of all nodes and this node's number. Under the lock."""
        with self.changed:
            old = self.group
            if old is None or (group["epoch"], group["generation"]) > (old["epoch"], old["generation"]):
                self.group, self.following, self.sent = group, held.NOTHING, held.NOTHING
                for endpoint, sock in list(self.links.values()):
                    if endpoint not in group["endpoints"]:  # a thread may be waiting for a node that fell silent
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)

    def holds(self, key: held.Key) -> bool | None:
        """Whether the next node has this version or a newer one; None: there are no replicas."""
        return self.sent >= key if self.replicas and self.group is not None else None

    # -- connections ------------------------------------------------------------------------------------------------
    def connect(self, endpoint: str) -> socket.socket:
        """Raises OSError, also when the other side does not know the token."""
        host, _, port = endpoint.rpartition(":")
        sock = socket.create_connection((host, int(port)), LIMIT_S)
        try:
            asked = self._hear(sock)
            answered = handshake.answer(self.token, asked)
            wire.send_message(sock, answered)
            handshake.check_proof(self.token, asked, answered, self._hear(sock))
        except (OSError, ValueError):
            sock.close()
            raise
        return sock

    def _link(self, thread: str, endpoint: str) -> socket.socket:
        """The thread's connection to this keeper: the one that it has, or a new one. Raises OSError."""
        known = self.links.get(thread)
        if known is not None and known[0] == endpoint:
            return known[1]
        self._unlink(thread)
        sock = self.connect(endpoint)
        self.links[thread] = endpoint, sock
        return sock

    def _unlink(self, thread: str) -> None:
        known = self.links.pop(thread, None)
        if known is not None:
            known[1].close()

    def _hear(self, sock: socket.socket) -> dict[str, Any]:
        received = wire.receive_message(sock)
        if received is None:
            raise OSError("the other keeper closed the connection")
        return received[0]

    def _accept(self) -> None:
        while True:
            sock, _address = self.server.accept()
            threading.Thread(target=self._serve, args=(sock,), name=f"rt-peer-{sock.fileno()}", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError), sock:
            sock.settimeout(LIMIT_S)
            asked = handshake.challenge()
            wire.send_message(sock, asked)
            wire.send_message(sock, handshake.prove(self.token, asked, self._hear(sock)))
            while True:
                message = self._hear(sock)
                if message["op"] == "report":
                    wire.send_message(sock, self._report(message))
                elif message["op"] == "replica":
                    share = replica.receive(sock, message)
                    self.keeping.take_replica(message, share)
                    wire.send_message(sock, {"ok": True})
                elif message["op"] == "fetch":
                    found = self.keeping.share(message)
                    if found is None:
                        wire.send_message(sock, {"error": "not held here any more"})
                    else:
                        replica.send(sock, found, {}, replica.Pace(0))

    # -- agreement --------------------------------------------------------------------------------------------------
    def _report(self, message: dict[str, Any]) -> dict[str, Any]:
        """On the keeper of rank 0's node."""
        key = (message["root"], message["lineage"])
        with self.changed:
            for old in [k for k in self.agreements if k[0] == key[0] and k != key]:
                del self.agreements[old]
            agreement = self.agreements.setdefault(key, Agreement(message["num_nodes"], self.replicas))
            complete = [_key(k) for k in message["complete"]]
            return agreement.report(message["node"], complete, _key(message["sent"]))

    def _agree(self) -> None:
        while True:
            group = self.group
            num_nodes = len(group["endpoints"]) if group is not None else 1
            time.sleep(max(REPORT_S, REPORT_S * num_nodes / 10))
            if group is None or num_nodes < 2:
                continue
            about = {"op": "report", "root": group["root"], "lineage": group["lineage"], "num_nodes": num_nodes}
            complete = self.keeping.complete(group["root"])
            message = {**about, "node": group["node"], "complete": complete, "sent": list(self.sent)}
            try:
                if group["leader"] == group["node"]:
                    answer = self._report(message)
                else:
                    sock = self._link("agree", group["endpoints"][group["leader"]])
                    wire.send_message(sock, message)
                    answer = self._hear(sock)
                if group is self.group:
                    self.keeping.agree(group["root"], {name: _key(k) for name, k in answer.items()})
                    with self.changed:
                        self.following = _key(answer["following"])
                        self.changed.notify_all()
            except (OSError, ValueError, KeyError):
                self._unlink("agree")
                time.sleep(0.2)

    # -- replicas ---------------------------------------------------------------------------------------------------
    def _replicate(self) -> None:
        while True:
            with self.changed:
                while self.group is None or not self.replicas or self.following <= self.sent:
                    self.changed.wait(1.0)
                group, key = self.group, self.following
            began = time.monotonic()
            try:
                sock = self._link("replicate", group["endpoints"][(group["node"] + 1) % len(group["endpoints"])])
                pace = replica.Pace(self.bytes_per_s)
                for rank in group["local_ranks"]:
                    about = {"op": "replica", "root": group["root"], "key": list(key), "rank": rank}
                    share = self.keeping.share(about)
                    if share is None:
                        raise OSError("given up here meanwhile")
                    about["world_size"], about["lineage"] = group["world_size"], group["lineage"]
                    self.bytes_sent += replica.send(sock, share, about, pace)
                    self._hear(sock)
                with self.changed:
                    if group is self.group:
                        self.sent = key
                self.seconds = time.monotonic() - began
            except (OSError, ValueError, KeyError):
                self._unlink("replicate")
                time.sleep(0.1)

    def fetch(self, endpoints: list[str], message: dict[str, Any]) -> replica.Replica | None:
        """A share from any of these keepers. A worker that loads waits for it."""
        for endpoint in endpoints:
            with contextlib.suppress(OSError, ValueError, KeyError), self.connect(endpoint) as sock:
                wire.send_message(sock, {**message, "op": "fetch"})
                header = self._hear(sock)
                if "error" not in header:
                    return replica.receive(sock, header)
        return None


def _listen(address: str, family: socket.AddressFamily, remembered: Path) -> socket.socket:
    """Where the keeper before this one listened, if there was one: its neighbours know that port. Else any."""
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server((address, int(remembered.read_text())), family=family, backlog=FAMILY_SIZE)
    server = socket.create_server((address, 0), family=family, backlog=FAMILY_SIZE)
    remembered.write_text(f"{server.getsockname()[1]}\n")
    return server


def _key(value: Any) -> held.Key:
    return int(value[0]), int(value[1]), int(value[2])
