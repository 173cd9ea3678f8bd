"""What ranks without `ridethrough run` train: `beside.py '{"fault": {...}, "total": 12, ...}'`; prints one JSON line.

Faults by generation: `{"1": ["exception", RANK, STEP], ...}`, kinds exception, loop and kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import ridethrough as rt

OPTIONS = json.loads(sys.argv[1])
seen: list[list[int]] = []


def train(run: rt.Run) -> str:
    seen.append([run.rank, run.world_size])
    for step in run.steps(0, OPTIONS.get("total", 16)):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
        kind, rank, at = OPTIONS["faults"].get(str(run.generation), ("", -1, -1))
        if (run.rank, step) == (rank, at):
            if kind == "exception":
                raise ValueError(f"fault of generation {run.generation}")
            if kind == "loop":
                while True:
                    pass
            os.kill(os.getpid(), signal.SIGKILL)
    return "trained"


result = rt.run(train, min_world_size=OPTIONS.get("min_world_size"), max_restarts=OPTIONS.get("max_restarts", 100))
print(json.dumps({"result": result, "pid": os.getpid(), "seen": seen}), flush=True)
