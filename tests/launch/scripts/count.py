"""A job whose result depends on every step of every rank: each step adds rank-dependent numbers over all ranks.

State is kept in a file per step by rank 0, so that any process can go on from it. Prints who is where.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ridethrough as rt

OUT = Path(sys.argv[1])
STEPS = int(sys.argv[2])
STEP_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05


def saved() -> tuple[int, float]:
    found = sorted(OUT.glob("step-*.json"))
    return tuple(json.loads(found[-1].read_text())) if found else (0, 0.0)


def train(run: rt.Run) -> None:
    start = torch.tensor(saved(), dtype=torch.float64)
    dist.broadcast(start, 0)
    done, total = int(start[0]), float(start[1])
    me = {"generation": run.generation, "rank": run.rank, "pid": os.getpid(), "world": run.world_size, "start": done}
    with open(OUT / "entered.jsonl", "a") as file:
        file.write(json.dumps(me) + "\n")
    for step in run.steps(done, STEPS):
        time.sleep(STEP_S)
        value = torch.tensor([float(step * (run.rank + 1))], dtype=torch.float64)
        dist.all_reduce(value)
        total += float(value)
        if run.rank == 0:
            new = OUT / f".step-{step:06d}"
            new.write_text(json.dumps([step, total]))
            new.rename(OUT / f"step-{step:06d}.json")
    if not run.stopped:
        (OUT / f"result-{run.rank}.json").write_text(json.dumps({"total": total, "pid": os.getpid()}))


def well() -> bool:
    """Not once the file that SICK names is there: a machine that breaks."""
    return "SICK" not in os.environ or not Path(os.environ["SICK"]).exists()


rt.run(train, check=well)
