"""Run by test_missing_collective: one of 4 FSDP2 ranks on gloo, of which one leaves a collective out.

`python fsdp_worker.py RUN_DIR PHASE MODEL TIMEOUT_S` with torchrun's variables set. SIGUSR1 raises in the main thread.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from standin import Freed, StandInRun, say
from torch import nn
from torch.distributed.fsdp import fully_shard

from ridethrough.faults import injector


def free(*_: object) -> None:
    raise Freed


def main() -> None:
    run_dir, model, timeout_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGUSR1, free)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    run = StandInRun(run_dir, rank)
    injector.install(run)
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
    if model == "fsdp2":
        fully_shard(net[0])  # type: ignore[index]
        fully_shard(net[2])  # type: ignore[index]
        fully_shard(net)
    else:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    step = 0
    try:
        for step in range(1, 9):
            run.enter("step", step)
            x = torch.randn(8, 32)
            run.enter("forward", step)
            loss = net(x).square().mean()
            run.enter("backward", step)
            loss.backward()
            run.enter("optimizer", step)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        say(rank=rank, finished=step)
    except Freed:
        say(rank=rank, left="freed", step=step)
        time.sleep(timeout_s + 30)  # its sockets stay open: only the timeout can free the peers
    except RuntimeError as error:
        say(rank=rank, left="timeout" if "Timed out" in str(error) else "error", cause=str(error), step=step)
        time.sleep(timeout_s + 30)


if __name__ == "__main__":
    main()
