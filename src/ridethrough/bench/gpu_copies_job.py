"""What this machine can do at most, without any of our code: `python -m ridethrough.bench.gpu_copies_job FOLDER GIB`.

Copies between the GPU and shared memory that is registered with CUDA or not, a plain memcpy, and the folder's disk
past the page cache. Prints one JSON object, GB/s (1e9).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

CHUNK_BYTES = 16 << 20
THREADS = 4


def rate(nbytes: int, work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begun) / 1e9


def shared_memory(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """A new memfd, mapped, as a tensor; every page is there."""
    fd = os.memfd_create("ridethrough-bench")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(1)
    return memory, tensor


def copies(nbytes: int) -> dict[str, float]:
    _, memory = shared_memory(nbytes)
    _, other = shared_memory(nbytes)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found = {"memcpy": rate(nbytes, lambda: memcpy(other.data_ptr(), memory.data_ptr(), nbytes))}
    if not torch.cuda.is_available():
        return found
    device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        work()
        return rate(nbytes, work)

    found["to_device_pageable"] = copied(device, memory)
    found["to_host_pageable"] = copied(memory, device)
    found["registering"] = rate(nbytes, lambda: cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
    found["to_device_registered"] = copied(device, memory)
    found["to_host_registered"] = copied(memory, device)
    found["on_device"] = copied(torch.empty_like(device), device)
    cudart.cudaHostUnregister(memory.data_ptr())
    return found


def disk(folder: Path, nbytes: int) -> dict[str, float]:
    """Written and read by THREADS threads in pieces, by O_DIRECT where the file system has it; an fsync is counted."""
    memory, _ = shared_memory(nbytes)
    path = folder / "raw"
    starts = range(0, nbytes, CHUNK_BYTES)

    def by_threads(fd: int, piece: Callable[[int, int], Any]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda start: piece(fd, start), starts))

    def write() -> None:
        fd = _open(path, os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(fd, 0, nbytes)
        by_threads(fd, lambda fd, start: os.pwrite(fd, view[start : start + CHUNK_BYTES], start))
        os.fsync(fd)
        os.close(fd)

    def read() -> None:
        fd = _open(path, os.O_RDONLY)
        by_threads(fd, lambda fd, start: os.preadv(fd, [view[start : start + CHUNK_BYTES]], start))
        os.close(fd)

    with memoryview(memory) as view:
        try:
            return {"disk_write": rate(nbytes, write), "disk_read": rate(nbytes, read)}
        finally:
            path.unlink(missing_ok=True)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def main() -> None:
    folder, nbytes = Path(sys.argv[1]), int(float(sys.argv[2]) * (1 << 10)) << 20
    print("RESULT " + json.dumps({**copies(nbytes), **disk(folder, nbytes)}), flush=True)


if __name__ == "__main__":
    main()
