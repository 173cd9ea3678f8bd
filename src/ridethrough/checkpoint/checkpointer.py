"""`Checkpointer`: durable, verified checkpoints of a sharded training state that training does not feel.

    ckpt = Checkpointer("ckpt", state, every=500, keep=3)
    start = ckpt.load()
    for step in range(start.step + 1, total + 1):
        train_step(...)
        ckpt.step(step)
    ckpt.close()

All methods are called on the training thread, alike on all ranks. What happens underneath:
docs/checkpoints.md.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ridethrough.checkpoint import apply, recording, timeline
from ridethrough.checkpoint.client import KeeperClient, any_client, client_for
from ridethrough.checkpoint.copier import COPIER
from ridethrough.checkpoint.dcpindex_torch import trusted
from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout
from ridethrough.checkpoint.figures import Figures, LoadReport, Stopwatch
from ridethrough.checkpoint.layout import Lineage
from ridethrough.checkpoint.peers import Peers, host_identity
from ridethrough.checkpoint.recording import Emit
from ridethrough.checkpoint.restore import Index
from ridethrough.checkpoint.snapshot import Snapshotter
from ridethrough.checkpoint.state import State
from ridethrough.checkpoint.ticket import COMMITTED, FAILED, STAGED, SUPERSEDED, Ticket

_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def abandon(generation: int) -> None:
    """A generation has been left by a fault: its checkpointers let go of every tensor, hook and process group
    within half a second. Snapshots that are whole are handed to the keeper, the others are dropped. Main
    thread; never raises."""
    for checkpointer in list(_live):
        if checkpointer.generation <= generation:
            checkpointer.abandon()


class Checkpointer:
    """Saves and loads `state` under `root` (a folder that all ranks see; made if missing).

    every: save after each multiple of so many steps (`step`); None: only `save`.
    keep, keep_every: newest committed checkpoints to keep, and multiples of a step to keep for good.
    mode: "async" hides the copy behind the next forward and backward; "sync" blocks until committed; files
      are identical.
    on_error: what the next call does about a save that failed: "raise" CheckpointError, or "warn" and go on.
    slots: snapshots in host memory at once (each as large as this rank's share of the state).
    allow_missing, allow_extra: key patterns that may differ at load. allow_fresh: start at 0 when every
      checkpoint is damaged.
    Raises CheckpointError when root cannot be written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: State,
        *,
        every: int | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        mode: Literal["async", "sync"] = "async",
        on_error: Literal["raise", "warn"] = "raise",
        slots: int = 3,
        allow_missing: Iterable[str] = (),
        allow_extra: Iterable[str] = (),
        allow_fresh: bool = False,
        agree_timeout_s: float = 120.0,
        drain_timeout_s: float = 10.0,
        commit_timeout_s: float = 600.0,
        recorder: Emit | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise CheckpointError(f"every={every}: must be at least 1, or None")
        if mode not in ("async", "sync") or on_error not in ("raise", "warn"):
            raise CheckpointError('mode is "async" or "sync", on_error is "raise" or "warn"')
        self.root = Path(root).absolute()
        self.state = state
        self.every, self.keep, self.keep_every = every, keep, keep_every
        self.mode, self.on_error, self.slots = mode, on_error, slots
        self.allow_missing, self.allow_extra, self.allow_fresh = tuple(allow_missing), tuple(allow_extra), allow_fresh
        self.agree_timeout_s, self.drain_timeout_s = agree_timeout_s, drain_timeout_s
        self.commit_timeout_s = commit_timeout_s
        self.generation = int(os.environ.get("RIDETHROUGH_GENERATION", "0"))
        self.figures = Figures()
        self.lineage: Lineage | None = None
        self._recorder = recorder
        self._peers: Peers | None = None
        self._client: KeeperClient | None = None
        self._local_ranks: list[int] = [0]
        self._snapshotter: Snapshotter | None = None
        self._tickets: list[Ticket] = []
        self._errors: list[str] = []
        self._sequence = 0
        self._skipped: int | None = None
        self._prepares = any(p.is_cuda for m in state.modules.values() for p in m.parameters())
        self._closed = False
        self._lock = threading.Lock()
        timeline.check_root(self.root)
        _live.add(self)

    # -- the user's calls ---------------------------------------------------------------------------------------------
    def load(self) -> LoadReport:
        """Fill the state from the newest checkpoint that is committed and whole, all ranks from the same one,
        and start this generation's time line. An empty root is a fresh start (step 0).

        Waits at most drain_timeout_s for what an older generation had staged on this node. Raises
        NoUsableCheckpoint (all are damaged), StateMismatch (of another state), CheckpointTimeout (a peer did
        not answer).
        """
        began = time.monotonic()
        self._hand_over()
        peers, client = self._connect()
        client.ask(
            {"op": "drain", "root": str(self.root), "timeout_s": self.drain_timeout_s}, self.drain_timeout_s + 5.0
        )
        peers.gather("drained", True)

        def fill(index: Index) -> tuple[list[str], list[str], list[str]]:
            return apply.load_into(
                self.state, index, peers.rank, peers.world_size, self.allow_missing, self.allow_extra
            )

        attempt, result, rejected = timeline.choose_and_load(self.root, peers, fill, self.allow_fresh)
        step = attempt.step if attempt else 0
        self._claim(step, attempt.path.name if attempt else None)
        missing, extra, notes = result or ([], [], [])
        report = LoadReport(
            step,
            "storage" if attempt else "fresh",
            str(attempt.path) if attempt else None,
            rejected,
            self,
            missing,
            extra,
            notes,
        )
        if peers.rank == 0:
            for path, reason in rejected:
                if "no COMMIT" not in reason:
                    warnings.warn(f"checkpoint {path} not used: {reason}", stacklevel=2)
        self._report(
            "load",
            step=step,
            tier=report.tier,
            source=report.source,
            seconds=time.monotonic() - began,
            rejected=rejected,
        )
        return report

    def step(self, step: int) -> Ticket | None:
        """Step `step` is finished: saves if `every` says so. Returns the ticket, or None.

        Raises CheckpointError for an earlier save that failed (on_error="raise")."""
        self._check()
        self._skipped = None
        if self._snapshotter is not None:
            with self._stall():
                self._snapshotter.boundary()
        if self.every is None:
            return None
        if step % self.every:
            if self._prepares and self.lineage is not None:
                self._ready().prepare()
            return None
        return self._save(step, durable=False)

    def save(self, step: int, durable: bool = True) -> Ticket:
        """Save now the state after `step` finished steps. A durable save is never superseded and may wait for
        a free slot.

        Raises CheckpointError for an earlier save that failed, or when there is no memory for the snapshot."""
        self._check()
        if self._snapshotter is not None:
            with self._stall():
                self._snapshotter.boundary()
        return self._save(step, durable)

    def fence(self) -> None:
        """Call before anything but a torch optimizer changes parameters or optimizer state: waits for a
        running copy."""
        if self._snapshotter is not None:
            with self._stall():
                self._snapshotter.fence()

    def close(self, timeout_s: float = 600.0) -> None:
        """Finish what is staged and stop. Raises CheckpointError if a save failed, CheckpointTimeout if one
        is not durable in time; both name the steps. Calling it again does nothing."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if self._snapshotter is not None:
                self._snapshotter.settle()
            if self._skipped is not None:  # the last state of all is not the one to leave out
                self._save(self._skipped, durable=True)
            for ticket in list(self._tickets):
                try:
                    ticket.committed(max(0.0, deadline - time.monotonic()))
                except CheckpointTimeout:
                    raise
                except CheckpointError:
                    pass  # in self._errors
        finally:
            self._let_go()
        self._check(closing=True)

    def abandon(self) -> None:
        """The generation is over: let go of the state at once. Never raises, at most half a second."""
        if self._closed:
            return
        try:
            if self._snapshotter is not None:
                self._snapshotter.abandon(0.3)
        finally:
            self._let_go()

    # -- underneath -------------------------------------------------------------------------------------------------
    def _save(self, step: int, durable: bool) -> Ticket:
        self._connect()
        lineage = self.lineage or self._claim(None, None)
        snapshotter = self._ready()
        self._sequence += 1
        self._tickets = [t for t in self._tickets if not t.done]
        ticket = Ticket(step, durable, self._settle)
        self._tickets.append(ticket)
        self.figures.saves += 1
        began = time.monotonic_ns()
        with self._stall():
            attempt = lineage.attempt(self._sequence)
            snapshotter.start(step, self._sequence, attempt, durable, ticket, synchronous=self.mode == "sync")
            self._skipped = step if ticket.state == SUPERSEDED else None
            if self.mode == "sync":
                ticket.committed(self.commit_timeout_s)
        self._report("phase", t_ns=began, phase="save", edge="begin", step=step)
        self._report("phase", phase="save", edge="end", step=step)
        return ticket

    def _hand_over(self) -> None:
        """What an older generation of this process had staged reaches the keeper before any rank drains it."""
        COPIER.flush(2.0)
        known = any_client()
        if known is not None:
            known.ask({"op": "ping"}, 2.0)

    def _settle(self, ticket: Ticket) -> None:
        if self._snapshotter is not None and threading.current_thread() is threading.main_thread():
            self._snapshotter.settle()

    def _ready(self) -> Snapshotter:
        if self._snapshotter is None:
            assert self._peers is not None and self._client is not None and self.lineage is not None
            base = {
                "op": "stage",
                "root": str(self.root),
                "lineage": self.lineage.attempt(0),
                "rank": self._peers.rank,
                "world_size": self._peers.world_size,
                "local_ranks": self._local_ranks,
                "options": {
                    "epoch": self.lineage.epoch,
                    "generation": self.lineage.generation,
                    "nonce": self.lineage.nonce,
                    "keep": self.keep,
                    "keep_every": self.keep_every,
                    "commit_timeout_s": self.commit_timeout_s,
                    "metadata_by_torch": not trusted(),
                },
            }
            self._snapshotter = Snapshotter(self.state, self._peers, self._client, base, self.slots, self._event)
        return self._snapshotter

    def _event(self, ticket: Ticket, event: dict[str, Any]) -> None:
        """A snapshot has come further. Called on the copy thread, or on the keeper's reader thread."""
        kind, figures = event["ev"], self.figures
        with self._lock:
            if kind == "staged":
                figures.staged += 1
                ticket.advance(STAGED)
            elif kind == "committed":
                figures.committed += 1
                figures.bytes_committed += event["bytes"]
                figures.write_s += event["seconds"]
                figures.last_committed_step = max(figures.last_committed_step, ticket.step)
                figures.last_committed_at = time.monotonic()
                ticket.advance(COMMITTED, path=event["path"], seconds=event["seconds"], nbytes=event["bytes"])
            elif kind == "superseded":
                figures.superseded += 1
                figures.skipped += bool(event.get("skipped"))
                if ticket.durable and not self._closed:
                    error = f"durable save of step {ticket.step} was dropped: {event.get('reason')}"
                    self._errors.append(error)
                    ticket.advance(FAILED, error=error)
                else:
                    ticket.advance(SUPERSEDED)
            else:
                figures.failed += 1
                rank = event.get("rank")
                who = f"rank {rank}" if rank is not None else "the keeper"
                error = f"save of step {ticket.step} failed on {who}: {event['path']}: {event['error']}"
                self._errors.append(error)
                ticket.advance(FAILED, error=error)
        self._report(
            "save",
            step=ticket.step,
            event=kind,
            bytes=event.get("bytes", 0),
            seconds=event.get("seconds", 0.0),
            path=event.get("path"),
            error=event.get("error"),
        )

    def _check(self, closing: bool = False) -> None:
        if self._closed and not closing:
            raise CheckpointError("this Checkpointer is closed; make a new one")
        with self._lock:
            errors, self._errors = self._errors, []
        if not errors:
            return
        text = "; ".join(errors)
        if self.on_error == "raise":
            raise CheckpointError(text)
        warnings.warn(text, stacklevel=3)

    def _connect(self) -> tuple[Peers, KeeperClient]:
        """Meet the other ranks: who shares this node, and where its keeper listens. Once per checkpointer."""
        if self._peers is None or self._client is None:
            peers = Peers(self.agree_timeout_s)
            agent = os.environ.get("RIDETHROUGH_KEEPER")
            known = any_client()
            path = agent or (str(known.path) if known else None)
            nodes = peers.gather("nodes", [host_identity(), path])
            mine = nodes[peers.rank][0]
            self._local_ranks = [r for r, (host, _path) in enumerate(nodes) if host == mine]
            first = self._local_ranks[0]
            shared = next((p for h, p in nodes if h == mine and p), None)
            if shared is None:
                if peers.rank == first:
                    shared = str(Path(tempfile.mkdtemp(prefix="ridethrough-")) / "keeper.sock")
                    client_for(Path(shared), owned=True).connect()
                    peers.publish(f"keeper/{first}", shared)
                else:
                    shared = peers.read(f"keeper/{first}")
            self._client = client_for(Path(shared), owned=agent is None)
            self._client.connect()
            self._peers = peers
        return self._peers, self._client

    def _claim(self, resumed_from: int | None, base: str | None) -> Lineage:
        peers, _client = self._connect()
        value: Any = None
        if peers.rank == 0:
            try:
                lineage = timeline.claim(self.root, resumed_from, base, peers.world_size)
                value = [lineage.epoch, lineage.generation, lineage.nonce]
            except CheckpointError as error:
                value = str(error)
        value = peers.from_rank0("lineage", value)
        if isinstance(value, str):
            raise CheckpointError(value)
        self.lineage = Lineage(*value)
        return self.lineage

    def _let_go(self) -> None:
        self._closed = True
        if self._snapshotter is not None:
            self._snapshotter.close()
        self._snapshotter = None
        self._peers = None
        self.state = State(rng=False)
        _live.discard(self)

    def _stall(self) -> Stopwatch:
        return Stopwatch(self.figures)

    def _report(self, kind: str, **fields: Any) -> None:
        emit = self._recorder or recording.emit
        if emit is not None:
            emit(kind, **fields)
