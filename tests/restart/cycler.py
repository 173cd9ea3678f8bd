"""One fault per generation, `cycler.py '{"kind": "ddp", "cycles": 200}'`: each generation does three steps, then the
next rank in turn raises. Notes threads, descriptors and memory of each rank at each entry."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import trainee

import ridethrough as rt

CYCLES = int(trainee.OPTIONS.get("cycles", 20))
STEP_S = float(trainee.OPTIONS.get("step_s", 0.0))


def train(run: rt.Run) -> None:
    model, _ = trainee.wrap(trainee.OPTIONS["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    dist.barrier()
    status = Path("/proc/self/status").read_text()
    run.record(
        "note",
        cycle=run.generation,
        threads=len(os.listdir("/proc/self/task")),
        fds=len(os.listdir("/proc/self/fd")),
        rss_kb=int(status.split("VmRSS:")[1].split()[0]),
    )
    first = 3 * run.generation
    for step in run.steps(first, 3 * (CYCLES + 2)):
        time.sleep(STEP_S)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        if step == first + 3 and run.generation <= CYCLES and run.rank == run.generation % run.world_size:
            run.record("fault_injected", id=f"c{run.generation}", fault_kind="exception", phase="step", step=step)
            raise ValueError(f"cycle {run.generation}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.generation > CYCLES and step > first + 3:
            return


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    rt.run(train)
