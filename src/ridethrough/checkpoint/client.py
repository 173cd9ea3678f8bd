"""The worker's end of the keeper's socket.

One connection per process and keeper, reused by all generations. What was staged and not yet answered is
remembered here, without any tensor, so that it can be handed to a new keeper when the old one dies. Thread
`rt-keeper-io` reads the answers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.checkpoint import wire
from ridethrough.checkpoint.arena import POOL, Arena
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.generation import peer

Handler = Callable[[dict[str, Any]], None]
CONNECT_LIMIT_S = 10.0
MAX_RESTARTS = 5
HAND_OVER_ATTEMPTS = 20
HOLD_WAIT_S = 0.05
_serials = iter(range(1, 1 << 62))  # of connections, over all keepers


@dataclass
class Submission:
    """A landed snapshot as the keeper gets it: `group` and `message` say what it is, `persist` is there once it has
    passed its fence and is wanted in storage. `final`: its ticket knows how it ended, or there is none."""

    group: dict[str, Any]
    message: dict[str, Any]
    arena: Arena
    serial: int
    entries: list[dict[str, Any]]
    tail: bytes
    handler: Handler
    persist: dict[str, Any] | None = None
    final: bool = False
    freed: bool = False
    sent_to: int = -1  # serial of the connection that it was sent on

    @property
    def key(self) -> tuple[str, str, int]:
        return self.message["root"], self.message["lineage"], self.message["sequence"]


@dataclass
class _Wait:
    done: threading.Event = field(default_factory=threading.Event)
    reply: dict[str, Any] = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)


class KeeperClient:
    """`owned`: this process starts the keeper when it is not there; otherwise the node's agent does, and this
    process only when the agent's did not come back. Thread-safe. Raises CheckpointError when no keeper can be
    reached."""

    def __init__(self, path: Path, owned: bool) -> None:
        self.path, self.owned = path, owned
        self.serial = 0
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._lock = threading.RLock()
        self._known: set[str] = set()  # layouts and groups that this connection's keeper has
        self._pending: dict[tuple[str, str, int], Submission] = {}
        self._late: list[Submission] = []
        self._waits: dict[int, _Wait] = {}
        self._numbers = iter(range(1, 1 << 62))

    # -- connection -------------------------------------------------------------------------------------------------
    def connect(self) -> None:
        """Connect if not connected, starting the keeper if need be. At most CONNECT_LIMIT_S."""
        with self._lock:
            if self._sock is not None:
                return
            deadline = time.monotonic() + CONNECT_LIMIT_S
            spawn_at = time.monotonic() + (0.0 if self.owned else 3.0)
            while True:
                sock = self._try()
                if sock is not None:
                    break
                now = time.monotonic()
                if now >= spawn_at:
                    self._spawn()
                    spawn_at = now + 5.0
                if now > deadline:
                    raise CheckpointError(f"no keeper answers on {self.path} within {CONNECT_LIMIT_S:g} s{self._log()}")
                time.sleep(0.01)
            self._sock = sock
            self.serial = next(_serials)
            self._known.clear()
            threading.Thread(target=self._read, args=(sock, self.serial), name="rt-keeper-io", daemon=True).start()

    def _try(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            return None
        if not peer.is_ours(sock):
            sock.close()
            raise CheckpointError(f"{self.path} is served by another user; remove it")
        return sock

    def _spawn(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ridethrough.checkpoint.keeper", "--socket", str(self.path)]
        if self.owned:
            command.append("--exit-when-idle")
        if os.environ.get("RIDETHROUGH_RUN_DIR"):
            command += ["--run-dir", os.environ["RIDETHROUGH_RUN_DIR"]]
        with open(self.path.parent / "keeper.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def _log(self) -> str:
        try:
            text = (self.path.parent / "keeper.log").read_text(errors="replace").strip()
        except OSError:
            return ""
        return f": {text.splitlines()[-1]}" if text else ""

    # -- sending ----------------------------------------------------------------------------------------------------
    def hold(self, submission: Submission) -> None:
        """Hand over a landed snapshot. Called on the copy thread, which an optimizer may be waiting for: while a dead
        keeper is being replaced the snapshot is only noted, and goes to the new one."""
        self._pending[submission.key] = submission
        if not self._lock.acquire(timeout=HOLD_WAIT_S):
            self._late.append(submission)
            return
        try:
            self.connect()
            self._send_late()
            self._send_hold(submission)
        except OSError:
            return  # the reader sees the end of the stream too, and hands everything to a new keeper
        except CheckpointError as error:
            self._fail(submission, str(error))
        finally:
            self._lock.release()

    def persist(self, submission: Submission, message: dict[str, Any]) -> None:
        """Its fence has run: queue it for storage. The handler gets exactly one final event. Copy thread."""
        with self._lock:
            if submission.final:
                return
            try:
                self._send_late()
            except OSError:
                pass  # the reader sees that too
            submission.persist = message
            if submission.sent_to == self.serial:
                self.tell(message)

    def _send_late(self) -> None:
        """What landed while a dead keeper was being replaced. Under the lock."""
        while self._late:
            if self._late[0].sent_to != self.serial:  # else it was handed over with all others
                self._send_hold(self._late[0])
            self._late.pop(0)

    def withdraw(self, submission: Submission) -> None:
        """It is torn, or nobody needs it any more. Any thread."""
        with self._lock:
            submission.final = True
            names = ("root", "lineage", "sequence", "step", "rank")
            about = {name: submission.message[name] for name in names}
            lineage = {name: submission.group[name] for name in ("epoch", "generation")}
            self.tell({"op": "withdraw", **about, **lineage})

    def _send_hold(self, submission: Submission) -> None:
        sock, arena, message = self._sock, submission.arena, submission.message
        if sock is None:
            raise OSError("not connected")
        for gone in POOL.take_dropped():
            wire.send_message(sock, {"op": "arena_gone", "id": gone})
        if arena.sent_to != self.serial:
            wire.send_message(sock, {"op": "arena", "id": arena.id, "bytes": arena.nbytes}, [arena.fd])
            arena.sent_to = self.serial
        group = f"{submission.group['root']}|{submission.group['lineage']}"
        if group not in self._known:
            wire.send_message(sock, submission.group)
            self._known.add(group)
        if message["layout"] not in self._known:
            wire.send_message(sock, {"op": "layout", "hash": message["layout"], "entries": submission.entries})
            self._known.add(message["layout"])
        fd = os.memfd_create("ridethrough-tail", os.MFD_CLOEXEC)
        try:
            os.write(fd, submission.tail or b"\0")
            persist = message["persist"] and not submission.final
            wire.send_message(sock, {**message, "persist": persist}, [fd])
        finally:
            os.close(fd)
        submission.sent_to = self.serial
        if submission.persist is not None and not submission.final:
            wire.send_message(sock, submission.persist)

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send a request and wait for its reply; None when none came in time. A reply's descriptors are in "fds" and
        belong to the caller."""
        wait = _Wait()
        with self._lock:
            self.connect()
            number = next(self._numbers)
            self._waits[number] = wait
            try:
                assert self._sock is not None
                wire.send_message(self._sock, {**message, "id": number})
            except OSError:
                self._waits.pop(number, None)
                return None
        wait.done.wait(timeout_s)
        self._waits.pop(number, None)
        return {**wait.reply, "fds": wait.fds} if wait.reply else None

    def tell(self, message: dict[str, Any]) -> None:
        """Send without waiting; a keeper that is gone has nothing to do either."""
        with self._lock:
            if self._sock is not None:
                try:
                    wire.send_message(self._sock, message)
                except OSError:
                    pass

    # -- receiving --------------------------------------------------------------------------------------------------
    def _read(self, sock: socket.socket, serial: int) -> None:
        while True:
            try:
                received = wire.receive_message(sock)
            except (OSError, ValueError):
                received = None
            if received is None:
                break
            self._event(*received)
        sock.close()
        self._lost(serial)

    def _event(self, event: dict[str, Any], fds: list[int]) -> None:
        wait = self._waits.get(event.get("id") or -1)
        if wait is not None:
            wait.reply, wait.fds = event, fds
            wait.done.set()
            return
        for fd in fds:  # whoever asked has given up
            os.close(fd)
        if event["ev"] == "free":
            self._freed(event["arena"], event["serial"])
        elif "sequence" in event:
            self._ended(event)

    def _freed(self, arena: str, serial: int) -> None:
        POOL.release(arena, serial)
        self.restarts = 0
        with self._lock:
            for key, submission in list(self._pending.items()):
                if submission.arena.id == arena and submission.serial == serial:
                    submission.freed = True
                    if submission.final or submission.persist is None:
                        del self._pending[key]

    def _ended(self, event: dict[str, Any]) -> None:
        with self._lock:
            key = (event["root"], event["lineage"], event["sequence"])
            submission = self._pending.get(key)
            if submission is None:
                return
            if event.get("serial") is not None:  # refused outright: no `free` will come
                POOL.release(submission.arena.id, submission.serial)
                submission.freed = True
            told, submission.final = submission.final, True
            if submission.freed:
                del self._pending[key]
        if not told:
            submission.handler(event)

    def _lost(self, serial: int) -> None:
        """The keeper is gone: start it anew and hand over what it still had to keep or to write."""
        with self._lock:
            if serial != self.serial:
                return
            self._sock = None
            for wait in list(self._waits.values()):
                wait.done.set()
            self._late.clear()
            for submission in list(self._pending.values()):
                if submission.final and not submission.group["options"]["memory"]:  # only its `free` was still to come
                    self._pending.pop(submission.key, None)
                    POOL.release(submission.arena.id, submission.serial)
            waiting = [s for s in self._pending.values() if not s.freed]
            if not waiting:
                return
            self.restarts += 1
            try:
                if self.restarts > MAX_RESTARTS:
                    raise CheckpointError(f"the keeper on {self.path} died {self.restarts} times{self._log()}")
                self._hand_over(waiting)
                self._send_late()
            except (OSError, CheckpointError) as error:
                for submission in waiting:
                    self._fail(submission, f"the keeper died and could not be restarted: {error}")

    def _hand_over(self, waiting: list[Submission]) -> None:
        """Give everything to a new keeper. A dying one may still accept a connection just before its socket goes."""
        for attempt in range(HAND_OVER_ATTEMPTS):
            try:
                self.connect()
                for submission in waiting:
                    self._send_hold(submission)
                return
            except OSError:
                self._sock = None
                if attempt + 1 == HAND_OVER_ATTEMPTS:
                    raise
                time.sleep(0.05)

    def _fail(self, submission: Submission, error: str) -> None:
        self._pending.pop(submission.key, None)
        POOL.release(submission.arena.id, submission.serial)
        if not submission.final:
            submission.final = True
            submission.handler({"ev": "failed", "error": error, "path": str(self.path), "rank": None, "errno": None})


_clients: dict[Path, KeeperClient] = {}
_clients_lock = threading.Lock()


def client_for(path: Path, owned: bool) -> KeeperClient:
    """The process's connection to the keeper on `path` (made, not yet connected)."""
    with _clients_lock:
        if path not in _clients:
            _clients[path] = KeeperClient(path, owned)
        return _clients[path]


def any_client() -> KeeperClient | None:
    """A connection that this process already has, which the next generation should keep using."""
    with _clients_lock:
        return next(iter(_clients.values()), None)
