"""Snapshots that are not torn: what is copied at once, what later, and what makes a copy count.

At a boundary (the optimizers have stepped, nothing runs) everything that forward changes is copied at once.
What optimizers own stands still until their next step, so it is copied by the copy thread (CPU) or a side
stream (CUDA) while forward and backward run, and each optimizer's step waits for it in its pre-hook, the
*fence*. When the copy has landed the keeper is told; only when the fence has run does the snapshot count, which a
mark in the arena says. A boundary that is reached without a fence: if the tensors are as they were copied, nothing
has stepped and the snapshot stands; if not, it is withdrawn and from then on copies are synchronous, saying so. The
first two snapshots, and those of which no hook has shown that it would tell, are compared with the live tensors as a
whole, others by samples."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ridethrough.checkpoint import gpu, marks
from ridethrough.checkpoint.arena import POOL, Arena
from ridethrough.checkpoint.client import KeeperClient, Submission
from ridethrough.checkpoint.compare import equal, sample, telling, untouched
from ridethrough.checkpoint.copier import COPIER, CopyTask, copy_all, finite, prime
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.packing import Packer, Values, archive_by_torch
from ridethrough.checkpoint.peers import Peers
from ridethrough.checkpoint.plan import Placed, Plan, make_plan, replicated_hash, signature
from ridethrough.checkpoint.state import RNG, State, freeze
from ridethrough.checkpoint.ticket import Ticket
from ridethrough.checkpoint.watch import Watch

COMPARED_SNAPSHOTS = 2
SLOT_WAIT_S = 0.1
Event = Callable[[Ticket, dict[str, Any]], None]


@dataclasses.dataclass
class Wish:
    """What a snapshot is for. `attempt` names the save that is to be written to storage (None: memory only);
    `durable`: it must not be superseded; `ticket` is told how it went; `suspect`: no recovery should go back to it."""

    step: int
    sequence: int
    ticket: Ticket
    attempt: str | None = None
    durable: bool = False
    synchronous: bool = False
    suspect: bool = False


class _Pending:
    """A snapshot between its boundary and its fence."""

    def __init__(self, plan: Plan, arena: Arena, wish: Wish, message: dict[str, Any], values: Values) -> None:
        self.plan, self.arena, self.wish, self.message, self.values = plan, arena, wish, message, values
        self.serial = arena.serial
        self.ticket = wish.ticket
        self.task: CopyTask | None = None
        self.submission: Submission | None = None
        self.on_device = False
        self.marks: list[tuple[Placed, torch.Tensor]] = []  # samples taken at the boundary itself
        self.lock = threading.Lock()
        self.passed = False  # the fence has run, or the copy was synchronous
        self.landed = False  # all data is in the arena, and the keeper knows
        self.handed = False  # it went on to storage
        self.torn = False

    def ready(self, *, passed: bool = False, landed: bool = False) -> bool:
        """Note what has happened; True exactly once, to whoever completes it and so has to hand it on."""
        with self.lock:
            self.passed, self.landed = self.passed or passed, self.landed or landed
            if not (self.passed and self.landed) or self.handed or self.torn:
                return False
            self.handed = True
            return True


class Snapshotter:
    """Takes snapshots of one state in one generation. Training thread only, unless said otherwise. `memory`: the
    keeper holds every snapshot for a recovery, so each rank's has all that the rank needs."""

    def __init__(
        self,
        state: State,
        peers: Peers,
        client: KeeperClient,
        group: dict[str, Any],
        slots: int,
        event: Event,
        memory: bool = False,
    ) -> None:
        self.state, self.peers, self.client, self.group = state, peers, client, group
        self.slots, self.event, self.memory = slots, event, memory
        self.watch: Watch | None = None
        self.plan: Plan | None = None
        self.num_plans = 0
        self.alike = False  # all ranks hold the same replicated tensors
        self.replicated = ""  # hash of this rank's
        self.pending: _Pending | None = None
        self.on_device: CopyTask | None = None  # the newest copy from CUDA that a fence has let go on
        self.synchronous_only = False
        self.prepared = False
        self.num_compared = 0
        self.stepped = False  # an optimizer has stepped since the last boundary
        self.hooked = False  # the optimizers' hooks do run
        self._packer = Packer()
        self._hooks = []
        me = weakref.ref(self)

        def before_step(*_args: Any, **_kwargs: Any) -> None:
            snapshotter = me()
            if snapshotter is not None:
                snapshotter.stepped = snapshotter.hooked = True
                if snapshotter.pending is not None:
                    snapshotter.fence()
                elif snapshotter.on_device is not None:  # a second optimizer may be on another stream
                    snapshotter.on_device.hold_back()

        for optimizer in state.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(before_step))

    # -- taking one -------------------------------------------------------------------------------------------------
    def start(self, wish: Wish) -> bool:
        """Begin a snapshot; False if there is no slot for it. Raises CheckpointError when there is no memory."""
        with torch.no_grad():
            plan, values = self._current_plan(), self._values()
            arena = self._arena(plan, wish.durable or wish.synchronous)
            if arena is None:
                self.event(wish.ticket, {"ev": "superseded", "reason": "no free slot", "skipped": True})
                if wish.attempt is not None:
                    COPIER.submit(lambda: self._tell_dropped(wish))
                return False
            message = {
                "op": "hold",
                "root": self.group["root"],
                "lineage": self.group["lineage"],
                "rank": self.peers.rank,
                "sequence": wish.sequence,
                "step": wish.step,
                "persist": wish.attempt is not None,
                "arena": arena.id,
                "serial": arena.serial,
                "layout": plan.layout_hash,
                "bytes": plan.image_bytes if plan.raw else 0,
                "alone": plan.alone,
                "suspect": wish.suspect,
                "proven": self.hooked and not self.synchronous_only,
            }
            pending = _Pending(plan, arena, wish, message, values)
            now = wish.synchronous or self.synchronous_only
            copy_all(arena, plan.on_cpu if now else plan.unfenced)
            pending.passed = now
            if not now:
                pending.marks = [(i, sample(i.local).clone()) for i in telling(plan, self.num_compared)]
            pending.task = CopyTask(arena, [] if now else plan.fenced, lambda _task: self._copied(pending))
            self._queue_device(pending, pending.task, now)
            self.pending = None if now else pending
            if not (now and pending.on_device):
                COPIER.submit(pending.task)
        return True

    def _tell_dropped(self, wish: Wish) -> None:
        """This rank has no part in the save, so it can never be whole. Copy thread."""
        about = {"sequence": wish.sequence, "step": wish.step, "rank": self.peers.rank}
        group = {name: self.group[name] for name in ("root", "lineage")}
        self.client.tell({"op": "dropped", **group, **about})

    def prepare(self) -> None:
        """Make and register the arenas before the first save needs them, once the optimizers have their
        state. CUDA only: it takes seconds there, in the background. Raises CheckpointError when the memory is
        not there."""
        if self.prepared or not all(optimizer.state for optimizer in self.state.optimizers.values()):
            return
        self.prepared = True
        with torch.no_grad():
            devices = [i.local.device for i in self._current_plan().placed if i.local.device.type == "cuda"]
        if devices and self.plan is not None:
            for arena in POOL.reserve(self.plan.image_bytes, self.slots):
                gpu.pin_in_background(arena, devices[0])

    def _queue_device(self, pending: _Pending, task: CopyTask, now: bool) -> None:
        """Tensors on CUDA: what forward may change is cloned on the compute stream, all of it copied on a
        side stream."""
        arena = pending.arena
        if len(pending.plan.on_cpu) == len(pending.plan.placed):
            return
        items = [
            item if item.fenced else dataclasses.replace(item, local=item.local.clone())
            for item in pending.plan.placed
            if item.local.device.type == "cuda"
        ]
        if not items:
            return
        task.device_pieces, task.device = items, items[0].local.device
        gpu.pin_in_background(arena, items[0].local.device)
        task.after = gpu.boundary_event(items[0].local.device)
        pending.on_device = True
        if now:
            COPIER.submit(task)
            task.wait()

    def _current_plan(self) -> Plan:
        if self.plan is not None and self.watch is not None and self.watch.same():
            return self.plan
        self.watch = Watch(self.state)
        tensors = self.watch.tensors
        if self.plan is not None and self.plan.signature == signature(tensors):
            return self.plan
        self.num_plans += 1
        mine = replicated_hash(tensors)
        if self.num_plans == 1 or (self.alike and mine != self.replicated):  # what all hold alike changes on all alike
            self.alike = len(set(self.peers.gather("plan", mine))) == 1
        self.replicated = mine
        self.plan = make_plan(
            self.state, tensors, self.peers.rank, self.peers.world_size, shared=self.alike, own_small=self.memory
        )
        return self.plan

    def _arena(self, plan: Plan, must: bool) -> Arena | None:
        """A free slot. All may be taken for the moment that the keeper needs to drop a superseded one; a save
        that must be made waits until there is one, any other is skipped after SLOT_WAIT_S."""
        arena = POOL.acquire(plan.image_bytes, self.slots)
        limit = float(self.group["options"]["commit_timeout_s"]) if must else SLOT_WAIT_S
        deadline = time.monotonic() + limit
        while arena is None:
            if time.monotonic() > deadline:
                if not must:
                    return None
                raise CheckpointError(f"no snapshot slot became free; the keeper on {self.client.path} does not finish")
            time.sleep(0.001)
            arena = POOL.acquire(plan.image_bytes, self.slots)
        return arena

    def _values(self) -> Values:
        values: Values = []
        if self.peers.rank == 0 or self.memory:
            assert self.watch is not None
            for path, value in self.watch.shared_values():
                key = ".".join(map(str, path))
                frozen = value if path[-1] == "params" else freeze(value, key)
                values.append((key, list(path), frozen))
        for name, value in self.state.rank_values():
            leaf = f"rank{self.peers.rank}"
            values.append((f"{name}.{leaf}", [name, leaf], value if name == RNG else freeze(value, name)))
        return values

    # -- copy thread ------------------------------------------------------------------------------------------------
    def _copied(self, pending: _Pending) -> None:
        """The data is in place: put the constant bytes and the small values around it, and tell the keeper. Copy
        thread; what goes wrong reaches the ticket."""
        task = pending.task
        assert task is not None
        if task.cancelled:
            return
        try:
            if task.error is not None:
                raise task.error
            self._hold(pending, task)
        except Exception as error:  # a value that does not pickle raises anything at all
            POOL.release(pending.arena.id, pending.serial)
            what = "copy into shared memory" if error is task.error else "packing the snapshot"
            text = str(error) if error is task.error else f"{type(error).__name__}: {error}"
            failed = {"ev": "failed", "error": text, "path": what, "rank": self.peers.rank}
            with pending.lock:
                pending.torn = True
            self.event(pending.ticket, failed)
            return
        if pending.ready(landed=True):
            self._pass_on(pending)

    def _hold(self, pending: _Pending, task: CopyTask) -> None:
        plan, arena = pending.plan, pending.arena
        tail = bytearray()
        entries: list[dict[str, Any]] = []
        if plan.raw:
            prime(arena, plan)
        else:
            archive_by_torch(plan, arena, tail, entries)
        self._packer.pack(pending.values, tail, entries)
        whole = bool(task.flag) if task.flag is not None else finite(arena, plan.weights)
        message = {**pending.message, "entries": entries, "tail_bytes": len(tail), "finite": whole}
        ticket, event = pending.ticket, self.event
        known = plan.entries if plan.raw else []
        answer = lambda e: event(ticket, e)  # noqa: E731
        submission = Submission(self.group, message, arena, pending.serial, known, bytes(tail), answer)
        submission.final = pending.wish.attempt is None
        pending.submission = submission
        pending.values = []
        marks.end(arena.map, pending.serial)
        if pending.passed:
            marks.fence(arena.map, pending.serial)
        self.client.hold(submission)
        if pending.torn:
            self.client.withdraw(submission)

    def _pass_on(self, pending: _Pending) -> None:
        """Landed and fenced. Copy thread."""
        wish, submission = pending.wish, pending.submission
        assert submission is not None
        if wish.attempt is None:
            self.event(pending.ticket, {"ev": "held"})
            return
        size = pending.plan.image_bytes + len(submission.tail)
        self.event(pending.ticket, {"ev": "staged", "bytes": size})
        names = ("root", "lineage", "sequence", "step", "rank")
        message = {name: submission.message[name] for name in names}
        durable = wish.durable or wish.synchronous
        self.client.persist(submission, {"op": "persist", **message, "attempt": wish.attempt, "durable": durable})

    # -- what makes it count ----------------------------------------------------------------------------------------
    def fence(self) -> None:
        """An optimizer is about to write: wait for the copy, then the snapshot counts. Any thread that steps
        an optimizer."""
        pending = self.pending
        if pending is None or pending.task is None:
            return
        pending.task.hold_back()
        if self.pending is not pending:
            return
        whole = True
        if self.num_compared < COMPARED_SNAPSHOTS and (pending.arena.pinned or not pending.on_device):
            self.num_compared += 1
            pending.task.wait()
            whole = equal(pending.plan, pending.arena) and untouched(pending.arena, pending.marks)
        elif not pending.on_device:
            whole = untouched(pending.arena, pending.marks)
        if whole:
            self._accept(pending)
        else:
            self._discard(pending, "parameters or optimizer state changed before the optimizer's step hook ran")

    def boundary(self) -> bool:
        """A step has ended (or a save is asked for): a snapshot still waiting for its fence is accepted or
        discarded. Returns whether the state may be saved: an optimizer has stepped since the last boundary, so that no
        gradient is on its way into the next one."""
        pending = self.pending
        if pending is not None and pending.task is not None:
            pending.task.wait()
            if self._stands(pending):
                self._accept(pending)
            else:
                self._discard(
                    pending,
                    "an optimizer wrote without its step hook (compiled or custom); "
                    "call Checkpointer.fence() before it",
                )
        stepped, self.stepped = self.stepped, False
        return stepped or not self._gradients_pending()

    settle = boundary

    def _stands(self, pending: _Pending) -> bool:
        """Whether nothing was written since the copy began, with no fence to say so. Samples can miss a write to a few
        rows, so they are enough only where hooks run before writes, and the first snapshots were found whole."""
        if not untouched(pending.arena, pending.marks):
            return False
        return (self.hooked and self.num_compared >= COMPARED_SNAPSHOTS) or equal(pending.plan, pending.arena)

    def _gradients_pending(self) -> bool:
        """No optimizer has stepped as far as its hook tells. Where hooks have run before, that is so; else gradients
        without any optimizer state are the first ones, still being added up."""
        optimizers = self.state.optimizers.values()
        if not self.hooked and any(optimizer.state for optimizer in optimizers):
            return False
        return any(p.grad is not None for o in optimizers for g in o.param_groups for p in g["params"])

    def _accept(self, pending: _Pending) -> None:
        self.pending = None
        self.on_device = pending.task if pending.on_device else None
        pending.passed = True
        marks.fence(pending.arena.map, pending.serial)
        if pending.ready(passed=True):
            COPIER.submit(lambda: self._pass_on(pending))

    def _discard(self, pending: _Pending, why: str) -> None:
        self.pending = None
        self._withdraw(pending)
        self.synchronous_only = True
        warnings.warn(
            f"snapshot of step {pending.ticket.step} discarded: {why}. Copies are synchronous from now on.",
            stacklevel=4,
        )
        self.event(pending.ticket, {"ev": "superseded", "reason": f"torn: {why}"})

    def _withdraw(self, pending: _Pending) -> None:
        """It does not count, wherever it has got to; its arena comes back when nobody uses it."""
        with pending.lock:
            pending.torn = True
        marks.void(pending.arena.map)
        if pending.submission is not None:
            self.client.withdraw(pending.submission)
        else:
            POOL.release(pending.arena.id, pending.serial)

    # -- the end ----------------------------------------------------------------------------------------------------
    def abandon(self, limit_s: float) -> None:
        """Stop within `limit_s`: a whole copy whose tensors still stand is kept, anything else is dropped."""
        pending, self.pending = self.pending, None
        if pending is None or pending.task is None:
            return
        if pending.task.wait(limit_s) and pending.task.error is None:
            if self._stands(pending):
                self._accept(pending)
                return
        else:
            pending.task.cancelled = True
            pending.task.copied.wait(0.1)
        self._withdraw(pending)
        self.event(pending.ticket, {"ev": "superseded", "reason": "generation over"})

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pending = self.on_device = None
        self.plan = self.watch = None
        POOL.forget()
        self.state = State(rng=False)
