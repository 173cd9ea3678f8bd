"""What the keeper does with its workers' messages: holds their snapshots for a recovery, and queues some for storage.

A snapshot is *held* once its copy has landed, and *persisted* (queued for the writer) once its fence has run. What is
held and complete on all ranks is what a recovery loads; see `held`. All state is behind one lock, `wake`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridethrough.checkpoint import backlog, held, layout, wire
from ridethrough.checkpoint.job import Job, run_job
from ridethrough.checkpoint.kept import Client, Kept, Shared
from ridethrough.ledger.recorder import Recorder

if TYPE_CHECKING:
    from ridethrough.checkpoint.neighbours import Neighbours
    from ridethrough.checkpoint.replica import Replica

POLL_S = 0.02
LAST_WORDS_S = 1.0  # to read what a worker that has just died had still sent


class Keeping:
    """Threads: one per worker calls `serve`, one calls `work`."""

    def __init__(self, path: Path, recorder: Recorder, grace_s: float) -> None:
        self.path, self.recorder, self.grace_s = path, recorder, grace_s
        self.wake = threading.Condition()
        self.groups: dict[tuple[str, str], backlog.Group] = {}
        self.tiers: dict[str, held.Tier] = {}
        self.neighbours: Neighbours | None = None
        self.clients: set[Client] = set()
        self.current: Job | None = None
        self.stopping: float | None = None
        self.flushing = False
        self.written: dict[str, int] = {}  # newest committed step of each root
        self.seen: dict[tuple[str, str], dict[str, Any]] = {}  # what each group was told at its start
        self.last_client = time.monotonic()

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
                    keys = ("root", "lineage", "sequence", "arena", "serial", "id")
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
                client.arenas.clear()  # what is held keeps its arena
                client.layouts.clear()
                for kept in list(client.waiting):
                    kept.drop("worker")
                for tier in self.tiers.values():
                    tier.advance()
                self._free()
                self.wake.notify_all()

    def handle(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        op = message["op"]
        handler = getattr(self, f"_on_{op}", None)
        if handler is None:
            raise ValueError(f"unknown message {op!r}")
        handler(client, message, fds)

    def _on_arena(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        arena = Shared(fds[0], message["bytes"])
        with self.wake:
            client.arenas[message["id"]] = arena

    def _on_arena_gone(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        with self.wake:
            client.arenas.pop(message["id"], None)

    def _on_layout(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        client.layouts[message["hash"]] = message["entries"]

    def _on_group(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """A rank of a generation begins to hand over snapshots of a root."""
        with self.wake:
            key = (message["root"], message["lineage"])
            ranks = frozenset(message["local_ranks"])
            self.seen[key] = message
            if key not in self.groups:
                self.groups[key] = backlog.Group(key, ranks, message["world_size"], message["options"])
            if message["options"]["memory"]:
                self._tier(message["root"]).begin(_lineage(message), ranks, message["world_size"])
                if self.neighbours is not None:
                    self.neighbours.join(message)

    def _on_hold(self, client: Client, message: dict[str, Any], fds: list[int]) -> None:
        tail = Shared(fds[0], max(1, message["tail_bytes"])) if fds else None
        kept = Kept(client, message, tail)
        group = self.groups[message["root"], message["lineage"]]
        with self.wake:
            if message["persist"]:
                kept.uses.add("worker")
                client.waiting.add(kept)
                client.holds[message["root"], message["lineage"], message["sequence"]] = kept
            if group.info["memory"]:
                kept.uses.add("memory")
                key = (group.info["epoch"], group.info["generation"], message["step"])
                self._tier(message["root"]).add(key, message["lineage"], message["rank"], kept, kept.good)
                self._free()
            self.wake.notify_all()

    def _on_persist(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """A held snapshot has passed its fence, and is wanted in storage."""
        key = (message["root"], message["lineage"])
        with self.wake:
            kept = client.holds.pop((*key, message["sequence"]))
            group = self.groups.get(key)
            if group is None:  # sealed and forgotten meanwhile
                sealed = {"ev": "superseded", "reason": "generation over", "step": message["step"]}
                client.send({**sealed, "root": key[0], "lineage": key[1], "sequence": message["sequence"]})
                kept.drop("worker")
                return
            snapshot = backlog.Snapshot(
                message["sequence"], message["step"], message["durable"], message["attempt"], options=group.info
            )
            kept.uses.add("write")
            kept.drop("worker")
            dropped = group.stage(snapshot, backlog.Staged(message["rank"], kept))
            for gone in dropped:
                self.release(group, gone, {"ev": "superseded", "reason": group.sealed or "superseded"})
            self.wake.notify_all()

    def _on_withdraw(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """The worker has found a held snapshot torn, or its generation has ended before the fence."""
        with self.wake:
            kept = client.holds.pop((message["root"], message["lineage"], message["sequence"]), None)
            tier = self.tiers.get(message["root"])
            if tier is not None:
                tier.withdraw((*_lineage(message), message["step"]), message["rank"])
                self._free()
            if kept is not None:
                kept.drop("worker")
            self._drop(message)

    def _on_dropped(self, _client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """A rank has no part in this save."""
        with self.wake:
            self._drop(message)

    def _drop(self, message: dict[str, Any]) -> None:
        """So it can never be whole: the node's other ranks hear that. Under the lock."""
        group = self.groups.get((message["root"], message["lineage"]))
        gone = group.drop(message["sequence"]) if group is not None else None
        if group is not None and gone is not None:
            event = {"ev": "superseded", "reason": f"rank {message['rank']} has no part in it"}
            self.release(group, gone, event)
            self.wake.notify_all()

    def _on_drain(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """A worker is about to load from storage: older generations' incomplete snapshots go, the complete newest may
        finish."""
        with self.wake:
            self._seal_incomplete(message)
            deadline = time.monotonic() + float(message["timeout_s"])
            while time.monotonic() < deadline and not self._quiet(message):
                self.wake.wait(0.05)
            drained = self._quiet(message)
            if not drained:
                self._seal_locked(message)
        client.send({"ev": "drained", "id": message["id"], "complete": drained})

    def _on_seal(self, _client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        with self.wake:
            self._seal_locked(message)

    def _on_inventory(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """What could be loaded from this node's memory. Waits a moment for the last words of the dead."""
        deadline = time.monotonic() + LAST_WORDS_S
        with self.wake:
            while time.monotonic() < deadline and any(c.dying() for c in self.clients):
                self.wake.wait(0.005)
            tier = self.tiers.get(message["root"])
            versions = tier.inventory() if tier is not None else []
        client.send({"ev": "inventory", "id": message["id"], "versions": versions})

    def _on_fetch(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """Hand a share out: descriptors of its arena and tail, and what lies where. One that another node holds comes
        over the wire first."""
        found, source = self.share(message), "own"
        if found is None and self.neighbours is not None:
            found = self.neighbours.fetch(message["endpoints"], message)
        if not isinstance(found, Kept):
            source = "peer"
        if found is None:
            client.send({"ev": "fetched", "id": message["id"], "error": "no keeper holds it any more"})
            return
        names = ("arena_id", "serial", "nbytes", "tail_bytes", "entries", "alone", "size")
        about = {name: getattr(found, name) for name in names}
        client.send({"ev": "fetched", "id": message["id"], "source": source, **about}, found.descriptors)

    def _on_endpoint(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """Where other nodes' keepers reach this one; empty if there are none."""
        endpoint = self.neighbours.endpoint if self.neighbours is not None else ""
        client.send({"ev": "endpoint", "id": message["id"], "endpoint": endpoint})

    def _on_settle(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        """All ranks have loaded: `key` from memory, or something else (None). Older generations write what is complete
        and not behind it, for at most timeout_s."""
        with self.wake:
            tier = self._tier(message["root"])
            tier.settle(_key(message) if message["key"] is not None else None, _lineage(message))
            self._seal_incomplete(message)
            if message["step"] is not None:
                self.written[message["root"]] = min(message["step"], self.written.get(message["root"], -1))
            for group in self._older(message) if message["step"] is not None else ():
                for gone in group.roll_back(message["step"]):
                    self.release(group, gone, {"ev": "superseded", "reason": "rolled back"})
            self._free()
            self.wake.notify_all()
        timer = threading.Timer(message["timeout_s"], self._on_seal, (client, message, []))
        timer.daemon = True
        timer.start()
        client.send({"ev": "settled", "id": message.get("id")})

    def _on_forget(self, _client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        with self.wake:
            tier = self.tiers.get(message["root"])
            if tier is not None:
                tier.forget()
                self._free()

    def _on_ping(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        client.send({"ev": "pong", "id": message.get("id")})

    def _on_stop(self, _client: Client, _message: dict[str, Any], _fds: list[int]) -> None:
        self.stop()

    def _on_replicated(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        there = self.neighbours.holds(_key(message)) if self.neighbours is not None else None
        client.send({"ev": "replicated", "id": message["id"], "replicated": there})

    def _on_replica_time(self, client: Client, message: dict[str, Any], _fds: list[int]) -> None:
        seconds = self.neighbours.seconds if self.neighbours is not None else None
        client.send({"ev": "replica_time", "id": message["id"], "seconds": seconds})

    # -- other nodes' keepers -----------------------------------------------------------------------------------------
    def share(self, message: dict[str, Any]) -> Kept | Replica | None:
        """What is held here of a rank and version, own or replica. Any thread."""
        with self.wake:
            tier = self.tiers.get(message["root"])
            found: Kept | Replica | None = tier.part(_key(message), message["rank"]) if tier is not None else None
        return found if found is not None and found.counts() else None

    def take_replica(self, message: dict[str, Any], share: Replica) -> None:
        with self.wake:
            self._tier(message["root"]).add_replica(_key(message), message["world_size"], message["rank"], share)

    def complete(self, root: str) -> list[list[int]]:
        with self.wake:
            tier = self.tiers.get(root)
            keys = tier.complete() if tier is not None else []
        return [list(key) for key in keys]

    def agree(self, root: str, word: dict[str, held.Key]) -> None:
        with self.wake:
            tier = self._tier(root)
            if word["base"][:2] in (tier.lineage, held.NOTHING[:2]):
                tier.agree(**word)
                self._free()

    # -- underneath -------------------------------------------------------------------------------------------------
    def _tier(self, root: str) -> held.Tier:
        if root not in self.tiers:
            self.tiers[root] = held.Tier(Kept.counts)
        return self.tiers[root]

    def _free(self) -> None:
        """Give back what the tiers do not need any more. Under the lock."""
        for tier in self.tiers.values():
            for kept in tier.take_freed():
                kept.drop("memory")

    def _older(self, message: dict[str, Any]) -> list[backlog.Group]:
        """Groups of earlier generations than the message's, or all of the root's if it has none yet."""
        mine = [g for g in self.groups.values() if g.key[0] == message["root"]]
        return [g for g in mine if "lineage" not in message or _lineage(g.info) < _lineage(message)]

    def _quiet(self, message: dict[str, Any]) -> bool:
        return all(group.idle for group in self._older(message))

    def _seal_incomplete(self, message: dict[str, Any]) -> None:
        for group in self._older(message):
            for gone in group.seal("a newer generation loads", complete_too=False):
                self.release(group, gone, {"ev": "superseded", "reason": "generation over"})
            self._forget_idle(group)
        self.wake.notify_all()

    def _seal_locked(self, message: dict[str, Any]) -> None:
        """Older generations of this root write nothing more."""
        for group in self._older(message):
            for gone in group.seal("a newer generation has started", complete_too=True):
                self.release(group, gone, {"ev": "superseded", "reason": "generation over"})
            self._forget_idle(group)
        self.wake.notify_all()

    def release(self, group: backlog.Group, snapshot: backlog.Snapshot, event: dict[str, Any]) -> None:
        """A snapshot is written, or never will be: tell its workers how it ended. Under the lock."""
        if event["ev"] == "committed":
            self.written[group.key[0]] = max(snapshot.step, self.written.get(group.key[0], -1))
            for older in group.obsolete(snapshot):
                self.release(group, older, {"ev": "superseded", "reason": "a newer one is committed"})
        info = {"lineage": group.key[1], "root": group.key[0], "sequence": snapshot.sequence, "step": snapshot.step}
        for part in snapshot.parts.values():
            part.payload.drop("write")
            part.payload.client.send({**event, **info})
        self._forget_idle(group)

    def _forget_idle(self, group: backlog.Group) -> None:
        if group.sealed and not group.snapshots:
            self.groups.pop(group.key, None)

    # -- jobs -------------------------------------------------------------------------------------------------------
    def work(self) -> None:
        """Thread rt-job: one attempt after the other."""
        while True:
            announced = self._announced()
            with self.wake:
                chosen = self._choose(announced)
                if chosen is None:
                    if self.stopping is not None and not self.flushing:
                        return
                    following = any(not g.leads and g.snapshots for g in self.groups.values())
                    self.wake.wait(POLL_S * 2 if following else 1.0)
                    continue
                group, snapshot = chosen
                snapshot.state = backlog.WRITING
                job = self.current = Job(group, snapshot, self)
            run_job(job)
            with self.wake:
                self.current = None
                self.wake.notify_all()

    def _announced(self) -> dict[str, set[tuple[int, str]]]:
        """Attempts that other nodes' leaders have begun, by root. Without the lock: storage may hang."""
        with self.wake:
            roots = {g.key[0] for g in self.groups.values() if not g.leads and g.snapshots}
        return {root: layout.attempts_begun(root) for root in roots}

    def _choose(self, announced: dict[str, set[tuple[int, str]]]) -> tuple[backlog.Group, backlog.Snapshot] | None:
        for group in self.groups.values():
            snapshot = group.pick(None if group.leads else announced.get(group.key[0]))
            if snapshot is not None:
                return group, snapshot
        return None

    def stop(self) -> None:
        """Nothing new is taken; what is complete is written."""
        with self.wake:
            if self.stopping is None:
                self.stopping = time.monotonic()
            self.flush()

    def flush(self) -> None:
        """Queue the newest state that is held in memory and not in storage. Needs no worker: the ranks may be stuck."""
        with self.wake:
            for root, tier in self.tiers.items():
                keys = [key for key in tier.flushable(Kept.landed) if key[2] > self.written.get(root, -1)]
                for key in keys[:1] if tier.leads else keys:
                    self._queue(root, tier.versions[key])
            self.wake.notify_all()

    def _queue(self, root: str, version: held.Version) -> None:
        seen = self.seen[root, version.lineage]
        key = (root, version.lineage)
        step = version.key[2]
        ranks = frozenset(seen["local_ranks"])
        group = self.groups.setdefault(key, backlog.Group(key, ranks, seen["world_size"], seen["options"]))
        attempt = f"{version.lineage.rsplit('.', 1)[0]}.m{step}"
        if any(s.attempt == attempt for s in group.snapshots.values()):
            return
        self.flushing = True
        snapshot = backlog.Snapshot(-1 - step, step, True, attempt, options=seen["options"])
        for rank, kept in version.parts.items():
            kept.uses.add("write")
            snapshot.parts[rank] = backlog.Staged(rank, kept)
        group.snapshots[snapshot.sequence] = snapshot


def _lineage(message: dict[str, Any]) -> tuple[int, int]:
    return int(message["epoch"]), int(message["generation"])


def _key(message: dict[str, Any]) -> held.Key:
    epoch, generation, step = message["key"]
    return int(epoch), int(generation), int(step)
