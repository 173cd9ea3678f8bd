"""CUDA's half of the overlapped copy.

Into an arena that is registered with CUDA, all tensors are copied at once on a side stream (50 GB/s on an
H200), which waits for the compute stream's boundary; the optimizer's step then waits on the device, not on
the host. Registering happens once per arena, in the background (thread `rt-pin`), and holds up every launch of
the process meanwhile: so the pages are made before, which takes most of the time. The first snapshot in an arena
waits for that; where CUDA refuses, copies go through two small pinned buffers, and the fence waits on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ridethrough.checkpoint.arena import Arena
from ridethrough.checkpoint.plan import Placed

RING_BYTES = 32 << 20
POPULATE_BYTES = 64 << 20
POPULATE_THREADS = 4
_MADV_POPULATE_WRITE = 23
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_cuda: Any = torch.cuda
_streams: dict[int, Any] = {}
_ring: list[torch.Tensor] = []
_pinning = threading.Lock()


def side_stream(device: torch.device) -> Any:
    """The one stream of this process for snapshots on that device."""
    index = device.index or 0
    if index not in _streams:
        _streams[index] = _cuda.Stream(device)
    return _streams[index]


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded, called without the GIL: registering holds the calling thread
    for seconds."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "libcudart" in line:
                return ctypes.CDLL(line.split()[-1])
    return None


def pin_in_background(arena: Arena, device: torch.device) -> None:
    """Register the arena with CUDA, once. `arena.pinning` is set when that is done, or refused, which only costs
    speed; `arena.pinned` tells."""
    if arena.pin_asked:
        return
    arena.pin_asked = True

    def pin() -> None:
        try:
            with _pinning:
                _make_pages(arena.address, arena.nbytes)
                arena.pinned = _register(arena.address, arena.nbytes, device)
        finally:
            arena.pinning.set()  # whatever was raised: a snapshot waits for it, and the optimizer for that one

    threading.Thread(target=pin, name="rt-pin", daemon=True).start()


def _make_pages(address: int, nbytes: int) -> None:
    """By several threads: the kernel clears 2 GB/s each. An older kernel leaves it to whoever needs a page first."""
    starts = range(0, nbytes, POPULATE_BYTES)
    with ThreadPoolExecutor(POPULATE_THREADS, thread_name_prefix="rt-pages") as pool:
        for start in starts:
            size = min(POPULATE_BYTES, nbytes - start)
            pool.submit(_libc.madvise, address + start, size, _MADV_POPULATE_WRITE)


def _register(address: int, nbytes: int, device: torch.device, flags: int = 0) -> bool:
    """On a thread of its own: a refusal stays CUDA's last error of the thread that asked."""
    torch.cuda.set_device(device)  # of this thread; else a context on device 0 would be made
    runtime = _runtime()
    if runtime is None:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostRegister(address, nbytes, flags)) == 0
    code: int = runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags))
    return code == 0


@contextlib.contextmanager
def registered(memory: Sequence[torch.Tensor], device: torch.device | None) -> Iterator[None]:
    """Inside, copies from this mapped memory to the GPU run at the bus's speed, if there is a GPU and CUDA registers
    it."""
    if device is None:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="rt-register") as pool:
        done = [m for m in memory if pool.submit(_register, m.data_ptr(), m.nbytes, device, _READ_ONLY).result()]
    try:
        yield
    finally:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for each in done:
            cudart.cudaHostUnregister(each.data_ptr())


def copy_on_side_stream(
    arena: Arena, items: Sequence[Placed], after: Any, view: Callable[[Arena, Placed], torch.Tensor]
) -> tuple[Any, torch.Tensor | None]:
    """Queue all copies behind `after`, a boundary of the compute stream; returns the event of their end, and where the
    answer will be whether the weights are finite. Copy thread: with more copies than a stream's queue takes, queueing
    lasts as long as copying."""
    side = side_stream(items[0].local.device)
    side.wait_event(after)
    with torch.cuda.stream(side):
        torch._foreach_copy_([view(arena, item) for item in items], [item.local for item in items], non_blocking=True)
        flag = finite_flag(items)
        event = _cuda.Event()
        event.record(side)
    return event, flag


def finite_flag(items: Sequence[Placed]) -> torch.Tensor | None:
    """Whether the weights are all finite, computed behind the copies on the side stream; the answer is in the (pinned)
    tensor once what was queued is done. None: there are no weights."""
    weights = [i.local for i in items if i.is_weight]
    if not weights:
        return None
    answer = torch.empty((), dtype=torch.bool, pin_memory=True)
    with torch.cuda.stream(side_stream(weights[0].device)):
        norms = torch._foreach_norm(weights, float("inf"))
        answer.copy_(torch.isfinite(torch.stack([n.float() for n in norms])).all(), non_blocking=True)
    return answer


def boundary_event(device: torch.device) -> Any:
    """An event at the present end of the compute stream."""
    event = _cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def copy_through_ring(arena: Arena, items: Sequence[Placed], after: Any, stop: Callable[[], bool]) -> bool:
    """Copy into memory that is not registered, by two pinned buffers in turn; False when told to stop. Copy
    thread only."""
    if not _ring:
        _ring.extend(torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    side = side_stream(items[0].local.device)
    side.wait_event(after)
    waiting: list[tuple[Any, torch.Tensor, int, int]] = []

    def land() -> None:
        event, buffer, address, size = waiting.pop(0)
        event.synchronize()
        ctypes.memmove(address, buffer.data_ptr(), size)

    turn = 0
    with torch.cuda.stream(side):
        for item in items:
            flat = item.local.contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, item.nbytes, RING_BYTES):
                if stop():
                    return False
                if len(waiting) == 2:
                    land()
                size = min(RING_BYTES, item.nbytes - start)
                buffer = _ring[turn % 2]
                buffer[:size].copy_(flat[start : start + size], non_blocking=True)
                event = _cuda.Event()
                event.record(side)
                waiting.append((event, buffer, arena.address + item.offset + start, size))
                turn += 1
        while waiting:
            land()
    return True
