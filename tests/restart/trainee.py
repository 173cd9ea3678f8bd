"""What the ranks of these tests run: a tiny model, wrapped in one of the ways people wrap theirs.

`trainee.py '{"kind": "ddp", "total": 40, ...}'`, see OPTIONS. The steps that are done live outside the training
function, as the objects of a real script do; the ranks agree on the lowest after each restart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ridethrough as rt

OPTIONS: dict[str, Any] = {
    "kind": "ddp",  # ddp | fsdp | fsdp1 | hsdp | mesh2d | none
    "total": 40,
    "step_s": 0.03,
    "save_every": 5,
    "eval_every": 10,
    "loader_workers": 0,
}
OPTIONS.update(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
finished = 0
entries = 0


def wrap(kind: str) -> tuple[nn.Module, list[dist.ProcessGroup]]:
    """The model, and the sub-groups that the step talks over beside the wrapper's own."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "ddp":
        return DistributedDataParallel(model), []
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model, []
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu")), []
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model, []
    if kind == "mesh2d":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "model"))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["data"])
        halves = [dist.new_group(list(range(i, world, 2))) for i in range(2)]
        return model, [halves[dist.get_rank() % 2], mesh["model"].get_group()]
    return model, []


def batches(workers: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(4096, dtype=torch.float32).reshape(-1, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)
    while True:
        yield from loader


def train(run: rt.Run) -> None:
    global finished, entries
    entries += 1
    model, groups = wrap(OPTIONS["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with run.phase("load"):
        start = torch.tensor([finished])
        if dist.is_initialized():
            dist.all_reduce(start, dist.ReduceOp.MIN)
    stream = batches(OPTIONS["loader_workers"]) if OPTIONS["loader_workers"] else None
    for step in run.steps(int(start), OPTIONS["total"]):
        with run.phase("data"):
            batch = next(stream)[0] if stream else torch.randn(4, 16)
        time.sleep(OPTIONS["step_s"])
        with run.phase("forward"):
            loss = model(batch).pow(2).mean()
        with run.phase("backward"):
            loss.backward()
        for group in groups:
            dist.all_reduce(torch.ones(8), group=group)
        with run.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if dist.is_initialized() and OPTIONS["kind"] == "none":
            dist.all_reduce(torch.ones(1))
        if step % OPTIONS["save_every"] == 0:
            with run.phase("save"):
                pass
        if step % OPTIONS["eval_every"] == 0:
            with run.phase("eval"), torch.no_grad():
                model(batch)
        finished = step
    run.record(
        "note",
        pid=os.getpid(),
        entries=entries,
        steps=finished,
        threads=len(os.listdir("/proc/self/task")),
        fds=len(os.listdir("/proc/self/fd")),
    )


if __name__ == "__main__":
    rt.run(train)
