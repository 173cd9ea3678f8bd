"""CUDA's half of the overlapped copy.

Into an arena that is registered with CUDA, all tensors are copied at once on a side stream (50 GB/s on an
H200), which waits for the compute stream's boundary; the optimizer's step then waits on the device, not on
the host. Registering takes seconds per 16 GiB and happens once per arena, in the background (thread
`rt-pin`); until then copies go through two small pinned buffers, and the fence waits on the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridethrough.checkpoint.arena import Arena
from ridethrough.checkpoint.plan import Placed

RING_BYTES = 32 << 20
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
    """Register the arena with CUDA, once. `arena.pinned` becomes True when that is done; a refusal only costs
    speed."""
    if arena.pinned or arena.pin_asked:
        return
    arena.pin_asked = True

    def pin() -> None:
        with _pinning:
            torch.cuda.set_device(device)  # of this thread; else a context on device 0 would be made
            runtime = _runtime()
            if runtime is None:
                cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = int(cudart.cudaHostRegister(arena.address, arena.nbytes, 0))
            else:
                size = ctypes.c_size_t(arena.nbytes)
                code = int(runtime.cudaHostRegister(ctypes.c_void_p(arena.address), size, ctypes.c_uint(0)))
            arena.pinned = code == 0

    threading.Thread(target=pin, name="rt-pin", daemon=True).start()


def copy_on_side_stream(
    arena: Arena, items: Sequence[Placed], view: Callable[[Arena, Placed], torch.Tensor]
) -> tuple[Any, torch.Tensor | None]:
    """Queue all copies behind what the compute stream has queued so far; returns the event of their end, and where the
    answer will be whether the weights are finite."""
    device = items[0].local.device
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for item in items:
            view(arena, item).copy_(item.local, non_blocking=True)
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
