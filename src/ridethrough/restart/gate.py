"""May this process enter another generation? Only if nothing of the last one can spoil the next; else replace it."""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import dataclass

import torch

from ridethrough.restart.exceptions import classify
from ridethrough.restart.thread_state import difference, modes

_MEMORY_SLACK_BYTES = 64 << 20
_MOST_CACHED = 1.5  # times the peak of live tensors
# They hold connections to the peers that torch knows nothing of, and that nobody can cut or make anew.
_FOREIGN = ("mpi4py.MPI", "horovod.torch", "nvshmem", "nvshmem.core", "deep_ep", "cupy.cuda.nccl", "mscclpp", "bagua")


@dataclass(frozen=True)
class Baseline:
    """What a process looked like before its first generation. CUDA memory in bytes, of live tensors."""

    modes: dict[str, object]
    cuda_bytes: int


def baseline() -> Baseline:
    """Main thread, before the training function is called for the first time."""
    return Baseline(modes(), torch.cuda.memory_allocated() if _cuda_used() else 0)


def why_not(before: Baseline, error: BaseException | None, *, aborted: bool, limit_s: float) -> str:
    """Why this process must not enter again, for people; empty if it may. Main thread, after everything of the
    generation has been let go; waits for the GPU at most `limit_s`. `aborted`: NCCL's abort came to its end in time."""
    if error is not None and classify(error) == "gpu":
        return f"CUDA failed: {_first_line(error)}"
    if not aborted:
        return "NCCL's abort did not end in time"
    foreign = [name for name in _FOREIGN if name in sys.modules]
    if foreign:
        return f"{', '.join(foreign)} holds connections that cannot be made anew"
    changed = difference(before.modes, modes())
    if changed:
        return f"torch's modes were left switched: {changed}"
    return _cuda(before, limit_s) if _cuda_used() else ""


def _cuda(before: Baseline, limit_s: float) -> str:
    sick = _synchronize(limit_s)
    if sick:
        return sick
    graphs = [o for o in gc.get_objects() if issubclass(type(o), torch.cuda.CUDAGraph)]  # asks no proxy what it is
    if graphs:
        return f"{len(graphs)} CUDA graphs are alive: they hold addresses and streams of the last generation"
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps them for ever: 64 MiB and more on an H100
    if torch.cuda.memory_reserved() > _MOST_CACHED * torch.cuda.max_memory_allocated():
        torch.cuda.empty_cache()  # blocks belong to streams, and FSDP makes new streams in each generation
    left = torch.cuda.memory_allocated() - before.cuda_bytes
    if left > _MEMORY_SLACK_BYTES:
        return f"{left / 2**20:.0f} MiB of GPU memory were not given back: something outside still refers to tensors"
    return ""


def _synchronize(limit_s: float) -> str:
    """A sticky error shows at the next synchronization; a GPU that hangs never comes to its end."""
    told: list[str] = []
    device = torch.cuda.current_device()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
            told.append("")
        except RuntimeError as error:
            told.append(f"CUDA failed: {_first_line(error)}")

    thread = threading.Thread(target=wait, name="ridethrough-gate", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[0] if told else f"the GPU did not come to an end within {limit_s:g} s"


def _cuda_used() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
