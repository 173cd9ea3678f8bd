"""Snapshots that are not torn: what is copied at once, what later, and what makes a copy count.

At a boundary (the optimizers have stepped, nothing runs) everything that forward changes is copied at once.
What optimizers own stands still until their next step, so it is copied by the copy thread (CPU) or a side
stream (CUDA) while forward and backward run, and each optimizer's step waits for it in its pre-hook, the
*fence*. Only when the fence has run does the snapshot count. A boundary that is reached without a fence: if
the tensors are as they were copied, nothing has stepped and the snapshot stands; if not, it is discarded and
from then on copies are synchronous, saying so. The first two snapshots are compared with the live tensors at
the fence.
"""

from __future__ import annotations

import dataclasses
import io
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ridethrough.checkpoint import gpu
from ridethrough.checkpoint.arena import POOL, Arena
from ridethrough.checkpoint.client import KeeperClient, Submission
from ridethrough.checkpoint.compare import equal, same_value, sample, telling, untouched
from ridethrough.checkpoint.copier import COPIER, CopyTask, copy_tensor, prime, target_view
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.peers import Peers
from ridethrough.checkpoint.plan import Placed, Plan, make_plan, replicated_hash, signature
from ridethrough.checkpoint.state import State, freeze
from ridethrough.checkpoint.template import save_without_crc
from ridethrough.checkpoint.ticket import Ticket

COMPARED_SNAPSHOTS = 2
SLOT_WAIT_S = 0.1
Values = list[tuple[str, list[str | int], Any]]
Event = Callable[[Ticket, dict[str, Any]], None]


class _Pending:
    """A snapshot between its boundary and its fence."""

    def __init__(self, plan: Plan, arena: Arena, ticket: Ticket, message: dict[str, Any], values: Values) -> None:
        self.plan, self.arena, self.ticket, self.message, self.values = plan, arena, ticket, message, values
        self.task: CopyTask | None = None
        self.on_device = False
        self.marks: list[tuple[Placed, torch.Tensor]] = []  # samples taken at the boundary itself
        self.lock = threading.Lock()
        self.passed = False  # the fence has run, or the copy was synchronous
        self.landed = False  # all data is in the arena
        self.handed = False  # it went on to the keeper

    def ready(self, *, passed: bool = False, landed: bool = False) -> bool:
        """Note what has happened; True exactly once, to whoever completes it and so has to hand it on."""
        with self.lock:
            self.passed, self.landed = self.passed or passed, self.landed or landed
            if not (self.passed and self.landed) or self.handed:
                return False
            self.handed = True
            return True


class Snapshotter:
    """Takes snapshots of one state in one generation. Training thread only, unless said otherwise."""

    def __init__(
        self, state: State, peers: Peers, client: KeeperClient, base: dict[str, Any], slots: int, event: Event
    ) -> None:
        self.state, self.peers, self.client, self.base = state, peers, client, base
        self.slots, self.event = slots, event
        self.plan: Plan | None = None
        self.num_plans = 0
        self.pending: _Pending | None = None
        self.synchronous_only = False
        self.prepared = False
        self.num_compared = 0
        self._blobs: dict[str, tuple[Any, bytes]] = {}
        self._hooks = []
        me = weakref.ref(self)

        def before_step(*_args: Any, **_kwargs: Any) -> None:
            snapshotter = me()
            if snapshotter is not None and snapshotter.pending is not None:
                snapshotter.fence()

        for optimizer in state.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(before_step))

    # -- taking one -------------------------------------------------------------------------------------------------
    def start(self, step: int, sequence: int, attempt: str, durable: bool, ticket: Ticket, synchronous: bool) -> None:
        """Begin the snapshot of `step`. Raises CheckpointError when there is no memory for it."""
        with torch.no_grad():
            plan = self._current_plan()
            arena = self._arena(plan, durable or synchronous)
            if arena is None:
                self.event(ticket, {"ev": "superseded", "reason": "no free slot", "skipped": True})
                return
            values = self._values()
            message = {
                **self.base,
                "sequence": sequence,
                "step": step,
                "attempt": attempt,
                "durable": durable or synchronous,
                "arena": arena.id,
                "layout": plan.layout_hash,
                "bytes": plan.image_bytes if plan.raw else 0,
            }
            pending = _Pending(plan, arena, ticket, message, values)
            now = synchronous or self.synchronous_only
            for item in plan.placed:
                if (now or not item.fenced) and item.local.device.type != "cuda":
                    copy_tensor(arena, item)
            pending.passed = now
            if not now:
                pending.marks = [(item, sample(item.local).clone()) for item in telling(plan)]
            later = [i for i in plan.placed if i.fenced and not now and i.local.device.type != "cuda"]
            pending.task = CopyTask(arena, later, lambda _task: self._copied(pending))
            self._queue_device(pending, pending.task, now)
            self.pending = None if now else pending
            if not (now and pending.on_device):
                COPIER.submit(pending.task)

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
        items = [
            item if item.fenced else dataclasses.replace(item, local=item.local.clone())
            for item in pending.plan.placed
            if item.local.device.type == "cuda"
        ]
        if not items:
            return
        task.device_pieces = items
        if arena.pinned:
            task.event = gpu.copy_on_side_stream(arena, items, target_view)
        else:
            gpu.pin_in_background(arena, items[0].local.device)
            task.after = gpu.boundary_event(items[0].local.device)
        pending.on_device = True
        if now:
            COPIER.submit(task)
            task.wait()

    def _current_plan(self) -> Plan:
        tensors = self.state.tensors()
        if self.plan is not None and self.plan.signature == signature(tensors):
            return self.plan
        self.num_plans += 1
        mine = replicated_hash(tensors)
        alike = len(set(self.peers.gather(f"plan/{self.num_plans}", mine))) == 1
        self.plan = make_plan(self.state, tensors, self.peers.rank, self.peers.world_size, shared=alike)
        return self.plan

    def _arena(self, plan: Plan, must: bool) -> Arena | None:
        """A free slot. All may be taken for the moment that the keeper needs to drop a superseded one; a save
        that must be made waits until there is one, any other is skipped after SLOT_WAIT_S."""
        arena = POOL.acquire(plan.image_bytes, self.slots)
        limit = float(self.base["options"]["commit_timeout_s"]) if must else SLOT_WAIT_S
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
        if self.peers.rank == 0:
            for path, value in self.state.shared_values():
                key = ".".join(map(str, path))
                values.append((key, list(path), freeze(value, key)))
        for name, value in self.state.rank_values():
            leaf = f"rank{self.peers.rank}"
            values.append((f"{name}.{leaf}", [name, leaf], freeze(value, name)))
        return values

    # -- copy thread ------------------------------------------------------------------------------------------------
    def _copied(self, pending: _Pending) -> None:
        """The data is in place: put the constant bytes and the small values around it. Copy thread."""
        task = pending.task
        assert task is not None
        if task.cancelled or task.error is not None:
            if task.error is not None:
                POOL.release(pending.arena.id)
                self.event(
                    pending.ticket,
                    {
                        "ev": "failed",
                        "error": str(task.error),
                        "path": "copy into shared memory",
                        "rank": self.peers.rank,
                    },
                )
            return
        if pending.ready(landed=True):
            self._stage(pending)

    def _stage(self, pending: _Pending) -> None:
        """Hand the snapshot to the keeper; what goes wrong reaches the ticket. Copy thread."""
        try:
            self._submit(pending)
        except Exception as error:  # a value that does not pickle raises anything at all
            POOL.release(pending.arena.id)
            text = f"{type(error).__name__}: {error}"
            self.event(
                pending.ticket,
                {"ev": "failed", "error": text, "path": "packing the snapshot", "rank": self.peers.rank},
            )

    def _submit(self, pending: _Pending) -> None:
        plan = pending.plan
        tail = bytearray()
        entries: list[dict[str, Any]] = []
        if plan.raw:
            prime(pending.arena, plan)
        else:
            _archive_by_torch(pending, tail, entries)
        for key, path, value in pending.values:
            blob = self._blob(key, value)
            entries.append({"k": key, "p": path, "f": 1, "o": len(tail), "n": len(blob)})
            tail += blob
        message = {**pending.message, "entries": entries, "tail_bytes": len(tail)}
        ticket, event = pending.ticket, self.event
        known = plan.entries if plan.raw else []
        submission = Submission(message, pending.arena, known, bytes(tail), lambda e: event(ticket, e))
        event(ticket, {"ev": "staged", "bytes": plan.image_bytes + len(tail)})
        self.client.stage(submission)

    def _blob(self, key: str, value: Any) -> bytes:
        known = self._blobs.get(key)
        if known is not None and same_value(known[0], value):
            return known[1]
        file = io.BytesIO()
        save_without_crc(value, file)
        self._blobs[key] = (value, file.getvalue())
        return self._blobs[key][1]

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

    def boundary(self) -> None:
        """A step has ended (or a save is asked for): a snapshot still waiting for its fence is accepted or
        discarded."""
        pending = self.pending
        if pending is None or pending.task is None:
            return
        pending.task.wait()
        if untouched(pending.arena, pending.marks):
            self._accept(pending)
        else:
            self._discard(
                pending,
                "an optimizer wrote without its step hook (compiled or custom); call Checkpointer.fence() before it",
            )

    settle = boundary

    def _accept(self, pending: _Pending) -> None:
        self.pending = None
        if pending.ready(passed=True) and pending.task is not None and pending.task.error is None:
            COPIER.submit(lambda: self._stage(pending))

    def _discard(self, pending: _Pending, why: str) -> None:
        self.pending = None
        POOL.release(pending.arena.id)
        self.synchronous_only = True
        warnings.warn(
            f"snapshot of step {pending.ticket.step} discarded: {why}. Copies are synchronous from now on.",
            stacklevel=4,
        )
        self.event(pending.ticket, {"ev": "superseded", "reason": f"torn: {why}"})

    # -- the end ----------------------------------------------------------------------------------------------------
    def abandon(self, limit_s: float) -> None:
        """Stop within `limit_s`: a whole copy whose tensors still stand is kept, anything else is dropped."""
        pending, self.pending = self.pending, None
        if pending is None or pending.task is None:
            return
        if pending.task.wait(limit_s) and pending.task.error is None:
            if untouched(pending.arena, pending.marks):
                self._accept(pending)
                return
        else:
            pending.task.cancelled = True
            pending.task.copied.wait(0.1)
        POOL.release(pending.arena.id)
        self.event(pending.ticket, {"ev": "superseded", "reason": "generation over"})

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pending = None
        self.plan = None
        self.state = State(rng=False)


def _archive_by_torch(pending: _Pending, tail: bytearray, entries: list[dict[str, Any]]) -> None:
    """Where torch's archives are not of the known form: let torch write them, out of the arena. Slower, and
    said once."""
    warnings.warn("this torch stores tensors in an unknown form; saves go through torch.save", stacklevel=2)
    archives: dict[int, tuple[int, int, int]] = {}
    for item in pending.plan.placed:
        file = io.BytesIO()
        view = target_view(pending.arena, item)
        torch.save(view.clone(), file)
        blob = file.getvalue()
        raw = bytes(pending.arena.map[item.offset : item.offset + item.nbytes])
        data_at = blob.find(raw)
        if data_at < 0:
            raise CheckpointError(
                "torch.save does not store a tensor's bytes as they are: no checkpoint can be written"
            )
        archives[item.offset] = (len(tail), len(blob), len(tail) + data_at)
        tail += blob
    for entry in pending.plan.entries:
        if entry["f"] is None:
            entries.append(entry)
        else:
            start, size, data_at = archives[entry["x"]]
            entries.append({**entry, "f": 1, "o": start, "n": size, "x": data_at})
