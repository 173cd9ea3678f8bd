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

import functools
import os
import sys
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
from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout
from ridethrough.checkpoint.figures import Figures, LoadReport, Stopwatch
from ridethrough.checkpoint.layout import Lineage
from ridethrough.checkpoint.loading import Limits, claim, load, settle
from ridethrough.checkpoint.meeting import Meeting
from ridethrough.checkpoint.outcomes import Outcomes
from ridethrough.checkpoint.overrides import overridden
from ridethrough.checkpoint.promise import Measuring, Promise, affordable_every
from ridethrough.checkpoint.recording import Emit
from ridethrough.checkpoint.snapshot import Snapshotter, Wish
from ridethrough.checkpoint.spike import LossSpike
from ridethrough.checkpoint.state import State
from ridethrough.checkpoint.ticket import COMMITTED, SUPERSEDED, Ticket

SAVES_OF_A_STEP = 1024  # most that are told apart; a save is known by its step, whatever else a rank has done
MAKE_GOOD_LOOK_S = 0.1

_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def abandon(generation: int) -> None:
    """A generation has been left by a fault: its checkpointers let go of every tensor, hook and process group
    within half a second. Snapshots that are whole are handed to the keeper, the others are dropped. Main
    thread; never raises."""
    for checkpointer in list(_live):
        if checkpointer.generation <= generation:
            checkpointer.abandon()


def live_roots() -> set[Path]:
    """Where the checkpointers of this process write that are neither closed nor abandoned."""
    return {checkpointer.root for checkpointer in list(_live) if not checkpointer._closed}


class Checkpointer:
    """Saves and loads `state` under `root` (a folder that all ranks see; made if missing).

    every: save after each multiple of so many steps (`step`); None: only `save`.
    keep, keep_every: newest committed checkpoints to keep, and multiples of a step to keep for good.
    mode: "async" hides the copy behind the next forward and backward; "sync" blocks until committed; files
      are identical.
    on_error: what the next call does about a save that failed: "raise" CheckpointError, or "warn" and go on.
    memory: hold a snapshot of every step ("auto") or of every so many (a number, or "measured": so many that they cost
      2 % of the first steps' time at most) in the keeper's memory, where it survives this process, and load from there
      after a fault; "auto" is "off" without `ridethrough run`, and with mode="sync".
    spike_factor: a snapshot whose loss, as told to `observe_loss`, is above so many times the median of the last 32
      does not replace an older one in memory; None: any loss may.
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
        memory: Literal["auto", "off", "measured"] | int = "auto",
        spike_factor: float | None = None,
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
        asked = overridden({"every": every, "mode": mode, "memory": memory})
        every, mode, memory = asked["every"], asked["mode"], asked["memory"]
        if every is not None and every < 1:
            raise CheckpointError(f"every={every}: must be at least 1, or None")
        if mode not in ("async", "sync") or on_error not in ("raise", "warn"):
            raise CheckpointError('mode is "async" or "sync", on_error is "raise" or "warn"')
        self.root = Path(root).absolute()
        self.state = state
        self.every, self.keep, self.keep_every = every, keep, keep_every
        if memory not in ("auto", "off", "measured") and (not isinstance(memory, int) or memory < 1):
            raise CheckpointError(f'memory={memory!r}: "auto", "off", "measured", or a number of steps from 1 on')
        if spike_factor is not None and not spike_factor > 1:
            raise CheckpointError(f"spike_factor={spike_factor!r}: must be above 1, or None")
        self.mode = mode
        self.allow_missing, self.allow_extra, self.allow_fresh = tuple(allow_missing), tuple(allow_extra), allow_fresh
        self.limits = Limits(agree_timeout_s, drain_timeout_s, storage_timeout_s)
        self.commit_timeout_s = commit_timeout_s
        launched = "RIDETHROUGH_KEEPER" in os.environ and mode == "async"
        self.memory_explicit = memory not in ("auto", "off")
        self.memory_every = (
            memory if isinstance(memory, int) else int(self.memory_explicit or (memory == "auto" and launched))
        )
        self._chosen_by_cost = memory == "measured"
        self._measuring = Measuring()
        self._spike = LossSpike(spike_factor) if spike_factor is not None else None
        self._suspect = False
        self.slots = slots
        self.generation = int(os.environ.get("RIDETHROUGH_GENERATION", "0"))
        self.figures = Figures()
        self._outcomes = Outcomes(self.figures, on_error, self._report)
        self.lineage: Lineage | None = None
        self._recorder = recorder
        self._meeting: Meeting | None = None
        self._claim_later: dict[str, Any] | None = None
        self._snapshotter: Snapshotter | None = None
        self._tickets: list[Ticket] = []
        self._numbered = (-1, 0)  # the step that was saved last, and how often
        self._last_step = 0
        self._due = False  # a save had to wait for the optimizer's step
        self._last: Ticket | None = None  # the newest save
        self._prepares = any(p.is_cuda for m in state.modules.values() for p in m.parameters())
        self._closed = False
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
        not answer), CheckpointError. The state may be written in part then: build it anew.
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
        if self.memory_every and step % self.memory_every == 0:
            self._measure(step)
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

    def observe_loss(self, loss: float) -> None:
        """The loss of the step in progress, for `spike_factor`. Before `step`, on any rank that has one."""
        if self._spike is not None:
            self._suspect |= self._spike.judge(loss)

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
            self._make_good(deadline)
            for ticket in list(self._tickets):
                try:
                    ticket.committed(max(0.0, deadline - time.monotonic()))
                except CheckpointTimeout:
                    raise
                except CheckpointError:
                    pass  # raised below
            stored = self._last is not None and self._last.state == COMMITTED and self._last.step >= self._last_step
            if self.memory_every and self._meeting is not None and stored:
                self._meeting.client.tell({"op": "forget", "root": str(self.root)})  # it is all in storage
        finally:
            self._let_go()
        self._outcomes.check()

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
    def _make_good(self, deadline: float) -> None:
        """The last state of all is not the one to leave out: if any rank had no slot for it, all save it once more. A
        rank that had one hears of that while it waits."""
        last = self._last
        if last is None or last.durable or last.step != self._last_step or self._meeting is None:
            return
        peers = self._meeting.peers
        while last.state != COMMITTED and time.monotonic() < deadline:
            if last.state == SUPERSEDED or peers.is_published(f"skipped/{last.step}"):
                self._save(last.step, durable=True)
                return
            if last.waited(MAKE_GOOD_LOOK_S) and last.state != SUPERSEDED:
                return

    def _remember(self, step: int) -> None:
        """A snapshot for the memory tier alone."""
        if self.lineage is None:
            return
        ticket = Ticket(step, False, self._settle, in_memory=True)
        with self._stall():
            self._ready().start(Wish(step, step * SAVES_OF_A_STEP, ticket, suspect=self._take_suspicion()))

    def _save(self, step: int, durable: bool) -> Ticket:
        meeting = self._meet()
        if self.lineage is None:
            self.lineage = claim(self.root, meeting, None, None, self.limits.storage_timeout_s)
            settle(self.root, meeting, self.lineage, None, None, self.limits)
        lineage = self.lineage
        snapshotter = self._ready()
        number = self._numbered[1] + 1 if self._numbered[0] == step else 1
        self._numbered = (step, number)
        self._tickets = [t for t in self._tickets if not t.done]
        ticket = Ticket(step, durable, self._settle)
        ticket._elsewhere = self._replicated
        self._last = ticket
        self._tickets.append(ticket)
        self.figures.saves += 1
        began = time.monotonic_ns()
        with self._stall():
            attempt = lineage.attempt(number)
            suspect = self._take_suspicion()
            sequence = step * SAVES_OF_A_STEP + number
            snapshotter.start(Wish(step, sequence, ticket, attempt, durable, self.mode == "sync", suspect))
            if ticket.state == SUPERSEDED:
                self._meet().peers.publish(f"skipped/{step}", True)
            if self.mode == "sync":
                ticket.committed(self.commit_timeout_s)
        self._report("phase", t_ns=began, phase="save", edge="begin", step=step)
        self._report("phase", phase="save", edge="end", step=step)
        return ticket

    def _take_suspicion(self) -> bool:
        suspect, self._suspect = self._suspect, False
        return suspect

    def _measure(self, step: int) -> None:
        """After the first snapshots: choose their interval by what they cost, if asked, and say what is promised."""
        measured = self._measuring.snapshot_begins(time.perf_counter(), self.figures.stall_s)
        if measured is None or self._meeting is None:
            return
        meeting, (between_s, snapshot_s) = self._meeting, measured
        step_s = between_s / self.memory_every
        every = affordable_every(step_s, snapshot_s) if self._chosen_by_cost else self.memory_every
        reply = meeting.client.ask({"op": "replica_time"}, 5.0) if meeting.speaks else None
        told = meeting.peers.gather("promise", [every, step_s, snapshot_s, reply["seconds"] if reply else None])
        everys, steps, costs, replicas = zip(*told, strict=True)
        self.memory_every = max(everys)
        slowest = max((r for r in replicas if r is not None), default=None)
        promise = Promise(self.memory_every, max(steps), max(costs), slowest)
        if meeting.peers.rank == 0:
            print(f"ridethrough: {promise.text()}", file=sys.stderr, flush=True)
        self._report("promise", step=step, **vars(promise), node_loss_steps=promise.node_loss_steps)

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
            self.slots = self.slots or (4 if meeting.num_nodes > 1 else 3)
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
            self._outcomes.speaks = meeting.speaks
            options = {
                "keep": self.keep,
                "keep_every": self.keep_every,
                "commit_timeout_s": self.commit_timeout_s,
                "memory": self.memory_every > 0,
                "claim": self._claim_later,
            }
            group = meeting.group(str(self.root), lineage, options)
            self._snapshotter = Snapshotter(
                self.state,
                meeting.peers,
                meeting.client,
                group,
                self.slots or 3,
                self._outcomes.event,
                self.memory_every > 0,
            )
        return self._snapshotter

    def _check(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")
        self._outcomes.check()

    def _meet(self) -> Meeting:
        """Meet the other ranks. Once per checkpointer."""
        if self._meeting is None:
            self._meeting = Meeting(self.limits.agree_timeout_s)
        return self._meeting

    def _let_go(self) -> None:
        self._closed = self._outcomes.closed = True
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
