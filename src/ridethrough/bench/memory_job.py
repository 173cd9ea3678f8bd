"""The job of `ridethrough bench memory`: `ridethrough run memory_job.py '{"part": "cost", ...}'`.

A state as FSDP2 shards it: parameters that are DTensors, with AdamW. Forward and backward wait, as for a GPU; the
optimizer's step is real.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ridethrough as rt
from ridethrough.bench.place import MARK, marked

PIECE = 1 << 20  # elements of a rank's share of one parameter
WARM_STEPS = 16  # arenas are made, two snapshots are compared whole, the promise is told


class Trainee:
    """Model, optimizer and gradients, `numel` elements of parameters on each rank: 12 bytes of state each."""

    def __init__(self, numel: int) -> None:
        torch.set_num_threads(1)
        mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
        self.model = nn.Module()
        self.shares, self.gradients = [], []
        for index in range(max(1, round(numel / PIECE))):
            share, gradient = torch.randn(PIECE), torch.randn(PIECE)
            whole = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)
            self.model.register_parameter(f"p{index}", nn.Parameter(whole))
            self.shares.append(share)
            self.gradients.append(DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=True)

    def step(self, run: rt.Run, seconds: float) -> None:
        with run.phase("forward"):
            time.sleep(seconds)
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))  # ranks go together, as in training

    def tensors(self) -> list[torch.Tensor]:
        """This rank's share of the state."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.shares, *(value.to_local() for value in moments if isinstance(value, DTensor))]


def cost(run: rt.Run, trainee: Trainee, checkpointer: rt.Checkpointer) -> None:
    """Blocks of steps without and with a snapshot of each, in turn."""
    reps, steps = OPTIONS["reps"], OPTIONS["steps"]
    blocks = [("warm", WARM_STEPS)] + [(kind, steps) for _ in range(reps) for kind in ("control", "snapshots")]
    plan = [(number, kind) for number, (kind, count) in enumerate(blocks) for _ in range(count)]
    took: list[float] = []
    stall_s, cpu_s = 0.0, _cpu_seconds()
    checkpointer.load()
    began = time.monotonic()
    for step in run.steps(0, len(plan)):
        number, kind = plan[step - 1]
        trainee.step(run, OPTIONS["step_s"])
        if kind != "control":
            checkpointer.step(step)
        took.append(time.monotonic() - began)
        began = time.monotonic()
        if step == len(plan) or plan[step][0] != number:
            checkpointer.fence()  # a block pays for its last copy, too
            took[-1] += time.monotonic() - began
            figures: dict[str, Any] = {"step_s": sum(took) / len(took), "median_s": statistics.median(took)}
            blocked = (checkpointer.figures.stall_s - stall_s) / len(took)
            spent = (_cpu_seconds() - cpu_s) / len(took)
            run.record("note", block=number, of=kind, stall_s=blocked, cpu_s=spent, **figures)
            dist.barrier()
            took, stall_s, cpu_s = [], checkpointer.figures.stall_s, _cpu_seconds()
            began = time.monotonic()


def killed(run: rt.Run, trainee: Trainee, checkpointer: rt.Checkpointer) -> None:
    """Steps with a snapshot of each; the launcher's schedule kills a rank. Then what a recovery has to do at least."""
    for _ in run.steps(checkpointer.load(), OPTIONS["steps"]):
        trainee.step(run, OPTIONS["step_s"])
    run.record("note", **floor(trainee))


def floor(trainee: Trainee) -> dict[str, Any]:
    """Seconds of a copy of the state into fresh memory, on all ranks at once, and of a new group's first collective."""
    dist.barrier()
    began = time.monotonic()
    copies = [tensor.clone() for tensor in trainee.tensors()]
    memcpy_s = time.monotonic() - began
    del copies
    dist.barrier()
    began = time.monotonic()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return {"memcpy_s": memcpy_s, "rebuild_s": time.monotonic() - began}


def train(run: rt.Run) -> None:
    trainee = Trainee(OPTIONS["numel"])
    state = rt.State(model=trainee.model, optimizer=trainee.optimizer)
    checkpointer = rt.Checkpointer(OPTIONS["root"], state, memory=1)
    run.record("note", state_bytes=3 * sum(share.nbytes for share in trainee.shares))
    {"cost": cost, "killed": killed}[OPTIONS["part"]](run, trainee, checkpointer)
    checkpointer.close()


def _cpu_seconds() -> float:
    """Of every process of the job so far: ranks, keepers, launchers."""
    total = 0
    for pid in marked(f"{MARK}={os.environ[MARK]}"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    OPTIONS = json.loads(sys.argv[1])
    rt.run(train)
