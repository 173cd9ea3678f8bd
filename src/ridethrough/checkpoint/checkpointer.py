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

import errno
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ridethrough.checkpoint import fileops, recording, timeline
from ridethrough.checkpoint.budget import agreed_slots
from ridethrough.checkpoint.client import any_client
from ridethrough.checkpoint.copier import COPIER
from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout, StorageFull
from ridethrough.checkpoint.figures import Figures, LoadReport, Stopwatch
from ridethrough.checkpoint.layout import Lineage
from ridethrough.checkpoint.loading import Limits, claim, load, settle
from ridethrough.checkpoint.meeting import Meeting
from ridethrough.checkpoint.recording import Emit
from ridethrough.checkpoint.snapshot import Snapshotter, Wish
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
    memory: hold a snapshot of every step ("auto") or of every so many (a number) in the keeper's memory, where it
      survives this process, and load from there after a fault; "auto" is "off" without `ridethrough run`, and with
      mode="sync".
    slots: snapshots in host memory at once (each as large as this rank's share of the state); None: as many as
      `memory` needs.
    allow_missing, allow_extra: key patterns that may differ at load. allow_fresh: start at 0 when every
      checkpoint is damaged.
    storage_timeout_s: how long storage may take to answer before training has begun.
    Raises CheckpointError when root cannot be written, CheckpointTimeout when it does not answer.
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
        memory: Literal["auto", "off"] | int = "auto",
        slots: int | None = None,
        allow_missing: Iterable[str] = (),
        allow_extra: Iterable[str] = (),
        allow_fresh: bool = False,
        agree_timeout_s: float = 120.0,
        drain_timeout_s: float = 10.0,
        commit_timeout_s: float = 600.0,
        storage_timeout_s: float = 60.0,
        recorder: Emit | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise CheckpointError(f"every={every}: must be at least 1, or None")
        if mode not in ("async", "sync") or on_error not in ("raise", "warn"):
            raise CheckpointError('mode is "async" or "sync", on_error is "raise" or "warn"')
        self.root = Path(root).absolute()
        self.state = state
        self.every, self.keep, self.keep_every = every, keep, keep_every
        if memory not in ("auto", "off") and (not isinstance(memory, int) or memory < 1):
            raise CheckpointError(f'memory={memory!r}: "auto", "off", or a number of steps from 1 on')
        self.mode, self.on_error = mode, on_error
        self.allow_missing, self.allow_extra, self.allow_fresh = tuple(allow_missing), tuple(allow_extra), allow_fresh
        self.limits = Limits(agree_timeout_s, drain_timeout_s, storage_timeout_s)
        self.commit_timeout_s = commit_timeout_s
        launched = "RIDETHROUGH_KEEPER" in os.environ and mode == "async"
        self.memory_every = memory if isinstance(memory, int) else int(memory == "auto" and launched)
        self.memory_explicit = isinstance(memory, int)
        self.slots = slots
        self.generation = int(os.environ.get("RIDETHROUGH_GENERATION", "0"))
        self.figures = Figures()
        self.lineage: Lineage | None = None
        self._recorder = recorder
        self._meeting: Meeting | None = None
        self._claim_later: dict[str, Any] | None = None
        self._snapshotter: Snapshotter | None = None
        self._tickets: list[Ticket] = []
        self._errors: list[CheckpointError] = []
        self._sequence = 0
        self._skipped: int | None = None
        self._last_step = 0
        self._due = False  # a save had to wait for the optimizer's step
        self._last_durable = -1
        self._prepares = any(p.is_cuda for m in state.modules.values() for p in m.parameters())
        self._closed = False
        self._lock = threading.Lock()
        fileops.hook_from_environment("RIDETHROUGH_LOAD_HOOK")
        if not (self.memory_every and self.generation > 1):  # a recovery from memory touches no storage
            check = functools.partial(timeline.check_root, self.root)
            timeline.bounded(check, storage_timeout_s, f"{self.root}: trying to write")
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
        self._end_snapshots()
        self._hand_over()
        meeting = self._meet()
        self._plan_memory(meeting)
        loaded = load(
            self.root,
            self.state,
            meeting,
            memory=self.memory_every > 0,
            missing_ok=self.allow_missing,
            extra_ok=self.allow_extra,
            allow_fresh=self.allow_fresh,
            limits=self.limits,
        )
        self.lineage, self._claim_later = loaded.lineage, loaded.claim
        report = loaded.report(self)
        if self.memory_every or self.every:
            self._ready()
        if meeting.peers.rank == 0:
            for path, reason in loaded.rejected:
                if "no COMMIT" not in reason:
                    warnings.warn(f"checkpoint {path} not used: {reason}", stacklevel=2)
        about = {"step": report.step, "tier": report.tier, "source": report.source, "rejected": report.rejected}
        self._report("load", seconds=time.monotonic() - began, **about)
        return report

    def step(self, step: int) -> Ticket | None:
        """Step `step` is finished: saves if `every` says so. Returns the ticket, or None.

        Raises CheckpointError for an earlier save that failed (on_error="raise")."""
        self._check()
        self._last_step = step
        self._skipped = None
        settled = True
        if self._snapshotter is not None:
            with self._stall():
                settled = self._snapshotter.boundary()
        self._due |= self.every is not None and step % self.every == 0
        if not settled:
            return None
        if self._due:
            self._due = False
            return self._save(step, durable=False)
        if self.memory_every and step % self.memory_every == 0:
            self._remember(step)
        elif self._prepares and self.lineage is not None and self.every is not None:
            self._ready().prepare()
        return None

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
            if self.memory_every and self._meeting is not None and self._last_durable >= self._last_step:
                self._meeting.client.tell({"op": "forget", "root": str(self.root)})  # it is all in storage
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
    def _remember(self, step: int) -> None:
        """A snapshot for the memory tier alone."""
        if self.lineage is None:
            return
        self._sequence += 1
        ticket = Ticket(step, False, self._settle, in_memory=True)
        with self._stall():
            self._ready().start(Wish(step, self._sequence, ticket))

    def _save(self, step: int, durable: bool) -> Ticket:
        meeting = self._meet()
        if self.lineage is None:
            self.lineage = claim(self.root, meeting, None, None, self.limits.storage_timeout_s)
            settle(self.root, meeting, self.lineage, None, None, self.limits)
        lineage = self.lineage
        snapshotter = self._ready()
        self._sequence += 1
        self._last_durable = step if durable else self._last_durable
        self._tickets = [t for t in self._tickets if not t.done]
        ticket = Ticket(step, durable, self._settle)
        ticket._elsewhere = self._replicated
        self._tickets.append(ticket)
        self.figures.saves += 1
        began = time.monotonic_ns()
        with self._stall():
            attempt = lineage.attempt(self._sequence)
            snapshotter.start(Wish(step, self._sequence, ticket, attempt, durable, self.mode == "sync"))
            self._skipped = step if ticket.state == SUPERSEDED else None
            if self.mode == "sync":
                ticket.committed(self.commit_timeout_s)
        self._report("phase", t_ns=began, phase="save", edge="begin", step=step)
        self._report("phase", phase="save", edge="end", step=step)
        return ticket

    def _replicated(self, step: int) -> bool | None:
        """Whether this generation's snapshot of `step`, or a newer one, is on another node; None: no replicas."""
        if self._meeting is None or self.lineage is None or not self.memory_every:
            return None
        key = [self.lineage.epoch, self.lineage.generation, step]
        reply = self._meeting.client.ask({"op": "replicated", "key": key}, 5.0)
        return reply["replicated"] if reply is not None else None

    def _hand_over(self) -> None:
        """What an older generation of this process had staged reaches the keeper before any rank drains it."""
        COPIER.flush(2.0)
        known = any_client()
        if known is not None:
            known.ask({"op": "ping"}, 2.0)

    def _settle(self, ticket: Ticket) -> None:
        if self._snapshotter is not None and threading.current_thread() is threading.main_thread():
            self._snapshotter.settle()

    def _plan_memory(self, meeting: Meeting) -> None:
        """Whether there is room for the memory tier, alike on all ranks."""
        if not self.memory_every:
            self.slots = self.slots or 3
            return
        least, said = agreed_slots(self.state, meeting, self.memory_explicit)
        if said and meeting.speaks:
            warnings.warn(said, stacklevel=4)
        self.memory_every = self.memory_every if least else 0
        self.slots = self.slots or max(least, 3)

    def _ready(self) -> Snapshotter:
        if self._snapshotter is None:
            assert self._meeting is not None and self.lineage is not None
            meeting, lineage = self._meeting, self.lineage
            options = {
                "keep": self.keep,
                "keep_every": self.keep_every,
                "commit_timeout_s": self.commit_timeout_s,
                "memory": self.memory_every > 0,
                "claim": self._claim_later,
            }
            group = meeting.group(str(self.root), lineage, options)
            self._snapshotter = Snapshotter(
                self.state, meeting.peers, meeting.client, group, self.slots or 3, self._event, self.memory_every > 0
            )
        return self._snapshotter

    def _event(self, ticket: Ticket, event: dict[str, Any]) -> None:
        """A snapshot has come further. Called on the copy thread, or on the keeper's reader thread."""
        kind, figures = event["ev"], self.figures
        if ticket.in_memory and kind != "failed":
            ticket.advance(STAGED if kind == "held" else SUPERSEDED)
            figures.held += kind == "held"
            figures.not_held += kind != "held"
            return
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
                    self._errors.append(CheckpointError(error))
                    ticket.advance(FAILED, error=error)
                else:
                    ticket.advance(SUPERSEDED)
            else:
                figures.failed += 1
                rank = event.get("rank")
                who = f"rank {rank}" if rank is not None else "the keeper"
                error = f"save of step {ticket.step} failed on {who}: {event['path']}: {event['error']}"
                full = event.get("errno") in (errno.ENOSPC, errno.EDQUOT)
                self._errors.append(StorageFull(error) if full else CheckpointError(error))
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
        text = "; ".join(map(str, errors))
        if self.on_error == "raise":
            raise type(errors[0])(text)
        warnings.warn(text, stacklevel=3)

    def _meet(self) -> Meeting:
        """Meet the other ranks. Once per checkpointer."""
        if self._meeting is None:
            self._meeting = Meeting(self.limits.agree_timeout_s)
        return self._meeting

    def _let_go(self) -> None:
        self._closed = True
        self._end_snapshots()
        self._meeting = None
        self.state = State(rng=False)
        _live.discard(self)

    def _end_snapshots(self) -> None:
        """The next snapshot is of another generation, or there is none."""
        if self._snapshotter is not None:
            self._snapshotter.settle()
            self._snapshotter.close()
        self._snapshotter = None

    def _stall(self) -> Stopwatch:
        return Stopwatch(self.figures)

    def _report(self, kind: str, **fields: Any) -> None:
        emit = self._recorder or recording.emit
        if emit is not None:
            emit(kind, **fields)
