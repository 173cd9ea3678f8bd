"""The job of `ridethrough bench gpu` that trains with the memory tier, bit for bit repeatable:

    ridethrough run --nproc-per-node 1 --fault-at sigkill:0:20:backward gpu_killed_job.py \\
        '{"root": "ckpt", "total": 60, "dim": 2048, "layers": 8, "sequences": 10}'

Its last word is a hash of the whole state: a job that was killed on the way must end as one that was not.
"""

from __future__ import annotations

import json
import sys

import torch

import ridethrough as rt
from ridethrough.bench.gpu_model import batch, build
from ridethrough.train.fingerprint import state_hash


def train(run: rt.Run) -> None:
    torch.use_deterministic_algorithms(True)
    model, optimizer = build(run.device, dim=OPTIONS["dim"], layers=OPTIONS["layers"], masters=True)
    checkpointer = rt.Checkpointer(OPTIONS["root"], rt.State(model=model, optimizer=optimizer))
    run.record("note", state_bytes=3 * sum(parameter.nbytes for parameter in model.parameters()))  # with two moments
    for step in run.steps(checkpointer.load(), OPTIONS["total"]):
        x, y = batch(step, run.rank, run.device, OPTIONS["sequences"])
        with run.phase("forward"):
            loss = model(x, y)
        with run.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
    run.record("final", final_hash=state_hash(model, optimizer))


if __name__ == "__main__":
    OPTIONS = json.loads(sys.argv[1])
    rt.run(train)
