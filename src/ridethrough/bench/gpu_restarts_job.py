"""The job of `ridethrough bench gpu` that fails in each generation, in the way that the next of its kinds says:

    ridethrough run --nproc-per-node 1 gpu_restarts_job.py \\
        '{"kinds": ["exception", "device_assert"], "dim": 1536, "layers": 12}'

At each entry it notes its process, its threads and descriptors, and the GPU's memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ridethrough as rt
from ridethrough.bench.gpu_model import batch, build

STEPS = 3  # of each generation; the fault is in the last
_kept: list[Any] = []  # outlives generations, as a user's global would


def _exception(model: nn.Module) -> None:
    raise ValueError("injected exception")


def _sigkill(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _device_assert(model: nn.Module) -> None:
    table = torch.zeros(4, device="cuda")
    table[torch.tensor([9], device="cuda")].sum().item()


def _illegal_access(model: nn.Module) -> None:
    source = 'extern "C" __global__ void stray(float *p) { *(volatile float *)16 = p[0]; }'
    stray = torch.cuda._compile_kernel(source, "stray")
    stray((1, 1, 1), (1, 1, 1), (torch.zeros(1, device="cuda"),))
    torch.cuda.synchronize()


def _out_of_memory(model: nn.Module) -> None:
    taken = []
    while True:
        taken.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def _leak(model: nn.Module) -> None:
    _kept.append(model)
    raise ValueError("injected exception; something outside still refers to the model")


def _cuda_graph(model: nn.Module) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
    _kept.append(graph)
    raise ValueError("injected exception; a captured graph is alive")


def _busy_gpu(model: nn.Module) -> None:
    torch.cuda._sleep(20_000_000_000)  # type: ignore[no-untyped-call]  # cycles: about 10 s
    raise ValueError("injected exception; the GPU is still at work")


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "exception": _exception,
    "sigkill": _sigkill,
    "device_assert": _device_assert,
    "illegal_access": _illegal_access,
    "out_of_memory": _out_of_memory,
    "leak": _leak,
    "cuda_graph": _cuda_graph,
    "busy_gpu": _busy_gpu,
}


def _note(run: rt.Run, kind: str) -> None:
    about: dict[str, Any] = {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd"))}
    about["python_threads"] = threading.active_count()
    if run.device.type == "cuda":
        about["allocated_bytes"] = torch.cuda.memory_allocated()
        about["reserved_bytes"] = torch.cuda.memory_reserved()
        about["device_bytes"] = torch.cuda.device_memory_used()  # of all processes, as NVML tells
    run.record("note", pid=os.getpid(), fault_kind=kind, **about)


def train(run: rt.Run) -> None:
    kinds: list[str] = OPTIONS["kinds"]
    kind = kinds[run.generation - 1] if run.generation <= len(kinds) else ""
    _note(run, kind)
    model, optimizer = build(run.device, dim=OPTIONS["dim"], layers=OPTIONS["layers"])
    first = STEPS * run.generation  # each generation makes progress, as one that loads a state would
    for step in run.steps(first, first + STEPS):
        x, y = batch(step, run.rank, run.device)
        loss = model(x, y)
        if kind and step == first + STEPS:
            run.record("fault_injected", id=f"g{run.generation}", fault_kind=kind, phase="step", step=step)
            KINDS[kind](model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


if __name__ == "__main__":
    OPTIONS = json.loads(sys.argv[1])
    rt.run(train)
