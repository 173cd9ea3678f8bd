"""The thread that copies a snapshot while the next forward and backward run.

One daemon thread per process, `rt-copy`, started at the first asynchronous save and reused by all
generations. It touches only memory that stands still until the optimizer's fence lets go, and reads raw
memory without the GIL, so that it slows the trainer by memory bandwidth alone.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridethrough.checkpoint import gpu
from ridethrough.checkpoint.arena import Arena
from ridethrough.checkpoint.plan import Placed, Plan

PIECE_BYTES = 32 << 20  # between two pieces the copy looks whether it was told to stop
PIN_LOOK_S = 0.02  # how often a copy that waits for its memory looks the same
SMALL_BYTES = 1 << 20  # tensors up to this size are copied many at a time, by one call without the GIL
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


class CopyTask:
    """One snapshot's overlapped part. `finish` runs on the copy thread when the data is in place (or was not:
    `error`)."""

    def __init__(self, arena: Arena, pieces: list[Placed], finish: Callable[[CopyTask], None]) -> None:
        self.arena, self.pieces, self.finish = arena, pieces, finish
        self.device_pieces: list[Placed] = []  # on CUDA
        self.device: torch.device | None = None  # theirs; it need not be the current one
        self.after: Any = None  # the boundary of the compute stream that these have to wait for
        self.event: Any = None  # end of the copies that a side stream makes
        self.flag: torch.Tensor | None = None  # on CUDA: whether the weights are finite
        self.cancelled = False
        self.copied = threading.Event()  # the live tensors are no longer needed
        self.error: BaseException | None = None

    def hold_back(self) -> None:
        """What is queued or run after this cannot change what is copied. Blocks the host for CPU tensors only
        (and for CUDA ones while their arena is not registered)."""
        self.copied.wait()
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait on the host until everything is copied; False after `limit_s`."""
        if not self.copied.wait(limit_s):
            return False
        deadline = time.monotonic() + (limit_s if limit_s is not None else 1e9)
        while self.event is not None and not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True


def prime(arena: Arena, plan: Plan) -> None:
    """Put the constant bytes of every archive in place, once per arena and layout."""
    if arena.primed == plan.layout_hash:
        return
    arena.primed = ""
    arena.views.clear()
    arena.batches.clear()
    for item in plan.placed:
        form = item.form
        start, end = item.offset - len(form.prefix), item.offset + item.nbytes
        arena.map[start : item.offset] = form.prefix
        arena.map[end : end + len(form.suffix)] = form.suffix
    arena.primed = plan.layout_hash


class Batch:
    """Tensors that are copied by one call, and how many bytes that is."""

    def __init__(self, arena: Arena, items: list[Placed]) -> None:
        self.targets = [target_view(arena, i) for i in items]
        self.sources = [i.local for i in items]


def copy_all(arena: Arena, items: list[Placed], stop: Callable[[], bool] = lambda: False) -> bool:
    """Copy CPU tensors into their places; False when told to stop on the way. Callable from any thread. `items` is a
    list that its plan keeps, so that it need not be looked through at each step."""
    known = arena.batches.get(id(items))
    if known is None or known[0] is not items:
        known = arena.batches[id(items)] = (items, *_batches(arena, items))
    _items, batches, rest = known
    for batch in batches:
        if stop():
            return False
        torch._foreach_copy_(batch.targets, batch.sources)
    return all(copy_tensor(arena, item, stop) for item in rest)


def _batches(arena: Arena, items: list[Placed]) -> tuple[list[Batch], list[Placed]]:
    small = [i for i in items if i.nbytes <= SMALL_BYTES and i.local.is_contiguous()]
    rest = [i for i in items if i.nbytes > SMALL_BYTES or not i.local.is_contiguous()]
    batches: list[Batch] = []
    group: list[Placed] = []
    size = 0
    for item in small:
        group.append(item)
        size += item.nbytes
        if size >= PIECE_BYTES:
            batches.append(Batch(arena, group))
            group, size = [], 0
    if group:
        batches.append(Batch(arena, group))
    return batches, rest


def finite(arena: Arena, weights: list[Placed]) -> bool:
    """Whether the weights in the arena are all finite numbers."""
    if not weights:
        return True
    views = [target_view(arena, i) for i in weights]
    # The 2-norm is ten times as fast as the maximum, but a large finite weight makes it overflow.
    return any(_all_finite(torch._foreach_norm(views, order)) for order in (2.0, float("inf")))


def _all_finite(norms: Sequence[torch.Tensor]) -> bool:
    return bool(torch.isfinite(torch.stack([n.to(torch.float64) for n in norms])).all())


def copy_tensor(arena: Arena, item: Placed, stop: Callable[[], bool] = lambda: False) -> bool:
    """Copy one CPU tensor into its place; False when told to stop on the way. Callable from any thread."""
    source = item.local
    if source.device.type == "cpu" and source.is_contiguous():
        done = 0
        while done < item.nbytes:
            if stop():
                return False
            size = min(PIECE_BYTES, item.nbytes - done)
            _memcpy(arena.address + item.offset + done, source.data_ptr() + done, size)
            done += size
        return True
    if stop():
        return False
    target_view(arena, item).copy_(source)
    return True


def target_view(arena: Arena, item: Placed) -> torch.Tensor:
    """The place of a tensor in the arena, as a tensor of its shape and dtype."""
    key = (item.offset, item.local.dtype, item.local.shape)
    view = arena.views.get(key)
    if view is None:
        flat = arena.bytes_tensor()[item.offset : item.offset + item.nbytes]
        view = arena.views[key] = flat.view(item.local.dtype).view(item.local.shape)
    return view


class Copier:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[CopyTask | Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, task: CopyTask | Callable[[], None]) -> None:
        """Hand over a copy, or a small piece of work that the trainer should not wait for."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="rt-copy", daemon=True)
                self._thread.start()
        self._queue.put(task)

    def flush(self, limit_s: float) -> bool:
        """Wait until everything handed over so far is done; False when that takes longer than `limit_s`."""
        if self._thread is None or not self._thread.is_alive():
            return True
        done = threading.Event()
        self.submit(done.set)
        return done.wait(limit_s)

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            if isinstance(task, CopyTask):
                self._copy(task)
            else:
                task()
            del task

    def _copy(self, task: CopyTask) -> None:
        try:
            with torch.no_grad():
                copy_all(task.arena, task.pieces, lambda: task.cancelled)
                if task.device_pieces:
                    self._copy_from_device(task)
        except (RuntimeError, OSError, ValueError) as error:
            task.error = error
        task.pieces = []
        if task.event is None:
            task.finish(task)  # handed over before the optimizer goes on: a kill from there on costs nothing
            task.copied.set()
        else:
            task.copied.set()
            task.event.synchronize()
            task.finish(task)
        task.device_pieces = []

    def _copy_from_device(self, task: CopyTask) -> None:
        pieces = task.device_pieces
        while not task.arena.pinning.wait(PIN_LOOK_S):
            if task.cancelled:
                return
        if task.arena.pinned:
            task.event, task.flag = gpu.copy_on_side_stream(task.arena, pieces, task.after, target_view)
            return
        gpu.copy_through_ring(task.arena, pieces, task.after, lambda: task.cancelled)
        task.flag = gpu.finite_flag(pieces)
        gpu.side_stream(pieces[0].local.device).synchronize()


COPIER = Copier()
