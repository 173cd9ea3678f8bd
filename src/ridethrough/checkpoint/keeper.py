"""python -m ridethrough.checkpoint.keeper --socket PATH [--run-dir DIR] [--exit-when-idle]

The keeper: one small process per node that maps the workers' snapshot arenas and turns them into committed
checkpoints. It outlives workers, so that what was staged is committed even if every rank dies. It prints
nothing, knows no torch, and is niced.

Threads: `main` accepts; `rt-client-*`, one per worker, reads its messages; `rt-job` writes, commits and
prunes, one attempt at a time, with a bounded pool of writers. SIGTERM: no new saves, what is complete is
finished within --grace seconds, then exit 0. It also ends when the process that started it is gone, or with
--exit-when-idle, once no worker is connected and nothing is left to write. A second keeper on the same socket
exits at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ridethrough.checkpoint import backlog, fileops, wire
from ridethrough.checkpoint.job import Job, run_job
from ridethrough.ledger.recorder import Recorder

IDLE_EXIT_S = 3.0
POLL_S = 0.02


class Arena:
    """A worker's memfd, mapped read-only for as long as the worker is connected or one of its snapshots needs
    it."""

    def __init__(self, fd: int, size: int) -> None:
        try:
            self.map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.size = size

    def view(self, size: int) -> memoryview:
        return memoryview(self.map)[:size]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still out: the last one to go closes the map
            self.map.close()


class Client:
    """One connected worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock: socket.socket | None = sock
        self.lock = threading.Lock()
        self.arenas: dict[str, Arena] = {}
        self.layouts: dict[str, list[dict[str, Any]]] = {}
        self.keys: set[tuple[str, str]] = set()

    def send(self, message: dict[str, Any]) -> None:
        """Tell the worker; it may be gone, which is no concern of the write."""
        with self.lock:
            if self.sock is not None:
                try:
                    wire.send_message(self.sock, message)
                except OSError:
                    pass


class Keeper:
    def __init__(self, path: Path, recorder: Recorder, *, exit_when_idle: bool, grace_s: float) -> None:
        self.path, self.recorder = path, recorder
        self.exit_when_idle, self.grace_s = exit_when_idle, grace_s
        self.wake = threading.Condition()
        self.groups: dict[tuple[str, str], backlog.Group] = {}
        self.clients: set[Client] = set()
        self.current: Job | None = None
        self.stopping: float | None = None
        self.last_client = time.monotonic()
        self.parent = os.getppid()

    # -- messages ---------------------------------------------------------------------------------------------------
    def serve(self, client: Client) -> None:
        """Thread rt-client-*: until the worker hangs up."""
        sock = client.sock
        assert sock is not None
        try:
            while True:
                received = wire.receive_message(sock)
                if received is None:
                    break
                message, fds = received
                try:
                    self.handle(client, message, fds)
                except (KeyError, TypeError, ValueError, OSError) as error:
                    keys = ("root", "lineage", "sequence", "arena", "id")
                    about: dict[str, Any] = {k: message[k] for k in keys if k in message}
                    text = f"the keeper refused {message.get('op')!r}: {type(error).__name__}: {error}"
                    client.send({"ev": "failed", "error": text, "path": str(self.path), "rank": None, **about})
        except (OSError, ValueError):
            pass
        finally:
            with client.lock:
                client.sock = None
            sock.close()
            with self.wake:
                self.clients.discard(client)
                self.last_client = time.monotonic()
                self._forget_arenas(client)
                self.wake.notify_all()

    def handle(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        op = message["op"]
        if op == "arena":
            arena = Arena(fds[0], message["bytes"])
            with self.wake:
                client.arenas[message["id"]] = arena
        elif op == "arena_gone":
            with self.wake:
                client.arenas.pop(message["id"], None)
        elif op == "layout":
            client.layouts[message["hash"]] = message["entries"]
        elif op == "stage":
            self._stage(client, message, fds)
        elif op == "drain":
            self._drain(client, message)
        elif op == "seal":
            self._seal(message)
        elif op == "ping":
            client.send({"ev": "pong", "id": message.get("id")})
        elif op == "stop":
            self.stop()
        else:
            raise ValueError(f"unknown message {op!r}")

    def _group(self, message: dict[str, Any]) -> backlog.Group:
        key = (message["root"], message["lineage"])
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = backlog.Group(
                key, frozenset(message["local_ranks"]), message["world_size"], {"root": message["root"]}
            )
        return group

    def _stage(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        arena = client.arenas[message["arena"]]
        buffers = [arena.view(message["bytes"])]
        if fds:
            tail = Arena(fds[0], max(1, message["tail_bytes"]))
            buffers.append(tail.view(message["tail_bytes"]))
        entries = client.layouts[message["layout"]] + message["entries"]
        payload = {
            "client": client,
            "arena": message["arena"],
            "buffers": buffers,
            "entries": entries,
            "layout": message["layout"],
        }
        snapshot = backlog.Snapshot(
            message["sequence"], message["step"], message["durable"], message["attempt"], options=message["options"]
        )
        with self.wake:
            client.keys.add((message["root"], message["lineage"]))
            group = self._group(message)
            dropped = group.stage(snapshot, backlog.Staged(message["rank"], payload))
            for gone in dropped:
                self.release(group, gone, {"ev": "superseded", "reason": group.sealed or "superseded"})
            self.wake.notify_all()

    def _drain(self, client: Client, message: dict[str, Any]) -> None:
        """A worker is about to load from `root`: older generations' incomplete snapshots go, the complete
        newest may finish."""
        with self.wake:
            for group in list(self.groups.values()):
                if group.key[0] == message["root"] and group.key[1] != message.get("lineage"):
                    for gone in group.seal("a newer generation loads", complete_too=False):
                        self.release(group, gone, {"ev": "superseded", "reason": "generation over"})
            self.wake.notify_all()
            deadline = time.monotonic() + float(message["timeout_s"])
            while time.monotonic() < deadline and not self._quiet(message):
                self.wake.wait(0.05)
            drained = self._quiet(message)
            if not drained:
                self._seal_locked(message)
        client.send({"ev": "drained", "id": message["id"], "complete": drained})

    def _quiet(self, message: dict[str, Any]) -> bool:
        return all(
            group.idle
            for group in self.groups.values()
            if group.key[0] == message["root"] and group.key[1] != message.get("lineage")
        )

    def _seal(self, message: dict[str, Any]) -> None:
        with self.wake:
            self._seal_locked(message)

    def _seal_locked(self, message: dict[str, Any]) -> None:
        """Older generations of this root write nothing more."""
        for group in list(self.groups.values()):
            if group.key[0] == message["root"] and group.key[1] != message.get("lineage"):
                for gone in group.seal("a newer generation has started", complete_too=True):
                    self.release(group, gone, {"ev": "superseded", "reason": "generation over"})
        self.wake.notify_all()

    def release(self, group: backlog.Group, snapshot: backlog.Snapshot, event: dict[str, Any]) -> None:
        """Give the arenas of a finished or dropped snapshot back to their workers, and say how it ended."""
        info = {"lineage": group.key[1], "root": group.key[0], "sequence": snapshot.sequence, "step": snapshot.step}
        for part in snapshot.parts.values():
            payload = part.payload
            payload["buffers"] = []
            payload["entries"] = []
            payload["client"].send({**event, **info, "arena": payload["arena"]})
        self._forget_idle(group)

    def _forget_idle(self, group: backlog.Group) -> None:
        if group.sealed and not group.snapshots:
            self.groups.pop(group.key, None)

    def _forget_arenas(self, client: Client) -> None:
        client.arenas.clear()  # views that snapshots hold keep their maps alive
        client.layouts.clear()

    # -- jobs -------------------------------------------------------------------------------------------------------
    def work(self) -> None:
        """Thread rt-job: one attempt after the other."""
        while True:
            with self.wake:
                chosen = self._choose()
                while chosen is None:
                    if self.stopping is not None:
                        return
                    waiting = any(not g.leads and g.snapshots for g in self.groups.values())
                    self.wake.wait(POLL_S * 2 if waiting else 1.0)
                    chosen = self._choose()
                group, snapshot = chosen
                snapshot.state = backlog.WRITING
                job = self.current = Job(group, snapshot, self)
            run_job(job)
            with self.wake:
                self.current = None
                self.wake.notify_all()

    def _choose(self) -> tuple[backlog.Group, backlog.Snapshot] | None:
        for group in self.groups.values():
            announced = None if group.leads else _announced(Path(group.key[0]))
            snapshot = group.pick(announced)
            if snapshot is not None:
                return group, snapshot
        return None

    # -- life -------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        with self.wake:
            if self.stopping is None:
                self.stopping = time.monotonic()
            self.wake.notify_all()

    def finished(self) -> bool:
        """Whether to exit now (asked by the main thread a few times a second)."""
        with self.wake:
            busy = self.current is not None or any(not g.idle for g in self.groups.values() if g.leads)
            now = time.monotonic()
            if self.stopping is not None:
                return not busy or now - self.stopping > self.grace_s
            if self.clients or busy:
                return False
            orphan = os.getppid() != self.parent
            return (self.exit_when_idle or orphan) and now - self.last_client > IDLE_EXIT_S


def _announced(root: Path) -> set[str]:
    from ridethrough.checkpoint.layout import parse_attempt

    try:
        return {parsed[1] for name in os.listdir(root) if (parsed := parse_attempt(name))}
    except OSError:
        return set()


def listen(path: Path) -> tuple[socket.socket, int] | None:
    """Bind the socket under a lock on `<socket>.lock`; None when another keeper has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        os.chmod(path.parent, 0o700)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(old)
    server.listen(64)
    server.settimeout(0.25)
    return server, lock


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ridethrough.checkpoint.keeper", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("--exit-when-idle", action="store_true")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish writes after SIGTERM")
    args = parser.parse_args(argv)
    bound = listen(args.socket)
    if bound is None:
        return 0
    server, lock = bound
    with contextlib.suppress(OSError):
        os.nice(10)
    hook = os.environ.get("RIDETHROUGH_FILE_HOOK")
    if hook:
        module, _, name = hook.partition(":")
        fileops.set_hook(getattr(import_module(module), name))
    keeper = Keeper(
        args.socket, Recorder(args.run_dir, "keeper"), exit_when_idle=args.exit_when_idle, grace_s=args.grace
    )
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=keeper.work, name="rt-job", daemon=True).start()
    uid = os.getuid()
    while not keeper.finished():
        try:
            sock, _ = server.accept()
        except (TimeoutError, InterruptedError):
            continue
        sock.settimeout(None)
        if wire.peer_credentials(sock)[1] != uid:
            sock.close()
            continue
        client = Client(sock)
        with keeper.wake:
            keeper.clients.add(client)
        threading.Thread(target=keeper.serve, args=(client,), name=f"rt-client-{sock.fileno()}", daemon=True).start()
    server.close()
    for leftover in (args.socket, Path(f"{args.socket}.lock")):
        with contextlib.suppress(OSError):
            os.unlink(leftover)
    if args.exit_when_idle:
        log = args.socket.parent / "keeper.log"
        with contextlib.suppress(OSError):
            if log.stat().st_size == 0:
                os.unlink(log)
            os.rmdir(args.socket.parent)
    os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
