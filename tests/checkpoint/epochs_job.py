"""What the ranks of test_memory.py train: a small MLP with dropout on noisy samples, over two epochs, with four loaders
side by side (0 or 2 worker processes, persistent or not). Each rank notes what every step saw.

epochs_job.py '{"out": folder, "root": folder, "every": 4, "memory": "auto", "steps": 16}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ridethrough as rt

OPTIONS: dict[str, Any] = {"every": 4, "memory": "auto", "steps": 16, "step_s": 0.0, "loaders": True}
OPTIONS |= {"nan_at": 0, "raise_at": 0, "spike_at": 0, "spike_factor": None, "replicate_at": 0}
OPTIONS.update(json.loads(sys.argv[1]))
STEPS_PER_EPOCH = 8


class Noisy(torch.utils.data.Dataset[Any]):
    """Sample i is its number and noise from the global stream."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((8,), index / 64) + 0.1 * torch.rand(8)


class Epochs:
    """A loader through its epochs; the state of both is one."""

    def __init__(self, run: rt.Run, workers: int, persistent: bool) -> None:
        data = Noisy()
        self.sampler = StatefulDistributedSampler(data, run.world_size, run.rank, shuffle=True, seed=3)
        self.loader = StatefulDataLoader(
            data,
            batch_size=4,
            sampler=self.sampler,
            num_workers=workers,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(1),  # the seed of workers is not drawn from the global stream
        )
        self.epoch, self.done, self.batches = 0, 0, None

    def __next__(self) -> Any:
        if self.batches is None:
            self.sampler.set_epoch(self.epoch)
            self.batches = iter(self.loader)
        batch = next(self.batches)
        self.done += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        if self.done == STEPS_PER_EPOCH:  # the next epoch begins with nothing drawn
            return {"epoch": self.epoch + 1, "done": 0, "loader": None}
        return {"epoch": self.epoch, "done": self.done, "loader": self.loader.state_dict() if self.done else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done, self.batches = state["epoch"], state["done"], None
        self.sampler.set_epoch(self.epoch)
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])

    def roll_over(self) -> None:
        if self.done == STEPS_PER_EPOCH:
            self.epoch, self.done, self.batches = self.epoch + 1, 0, None


def train(run: rt.Run) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(run.rank)
    random.seed(run.rank)
    numpy.random.seed(run.rank)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8))
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.97**s)
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3), multi_avg_fn=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    grid = [Epochs(run, w, p) for w, p in ((0, False), (2, False), (2, True))][: 3 if OPTIONS["loaders"] else 1]
    parts = {f"loader{i}": loader for i, loader in enumerate(grid)}
    state = rt.State(model=model, optimizer=optimizer, schedule=schedule, ema=average, scaler=scaler, **parts)
    checkpointer = rt.Checkpointer(
        OPTIONS["root"],
        state,
        every=OPTIONS["every"],
        memory=OPTIONS["memory"],
        spike_factor=OPTIONS["spike_factor"],
        storage_timeout_s=OPTIONS.get("storage_timeout_s", 60.0),
    )
    with run.phase("load"):
        loaded = checkpointer.load()
    if loaded.step == 0:
        fill(model, run)
    note_loaded(run, loaded, model)
    out = open(Path(OPTIONS["out"]) / f"rank{run.rank}.jsonl", "a")  # noqa: SIM115
    for step in run.steps(loaded, OPTIONS["steps"]):
        with run.phase("data"):
            drawn = [next(loader) for loader in grid]
        with run.phase("forward"):
            loss = model(drawn[0][1]).pow(2).mean()
        if step == OPTIONS["nan_at"] and run.generation == 1:
            loss = loss * float("nan")
        if OPTIONS["spike_at"] and run.generation == 2 and step >= OPTIONS["spike_at"]:
            loss = loss * 1000
        if step == OPTIONS["raise_at"] and run.generation <= 2:
            raise RuntimeError("this state is bad")
        checkpointer.observe_loss(loss.item())
        with run.phase("backward"):
            scaler.scale(loss).backward()
        time.sleep(OPTIONS["step_s"])
        with run.phase("optimizer"):
            if OPTIONS["nan_at"]:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        schedule.step()
        average.update_parameters(nn.Linear(3, 3))
        replicated = checkpointer.save(step).replicated(30) if step == OPTIONS["replicate_at"] else None
        draws = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        note = {"step": step, "ids": [d[0].tolist() for d in drawn], "loss": loss.item().hex(), "draws": draws}
        weights = [p.detach().to_local().double().sum().item().hex() for p in model.parameters()]
        extra = {
            "weights": weights,
            "sums": sums(model),
            "scale": scaler.get_scale(),
            "generation": run.generation,
            "tier": loaded.tier,
            "replicated": replicated,
        }
        out.write(json.dumps({**note, **extra}) + "\n")
        out.flush()
        for loader in grid:
            loader.roll_over()
    out.close()


def sums(model: nn.Module) -> list[str]:
    """Of the whole parameters, whatever the world size. Collective."""
    return [p.detach().full_tensor().double().sum().item().hex() for p in model.parameters()]


def note_loaded(run: rt.Run, loaded: Any, model: nn.Module) -> None:
    found = {"step": loaded.step, "tier": loaded.tier, "world": run.world_size, "sums": sums(model)}
    if run.rank == 0:
        with open(Path(OPTIONS["out"]) / "loaded.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")


def fill(model: nn.Module, run: rt.Run) -> None:
    for number, parameter in enumerate(model.parameters()):
        whole = torch.empty(parameter.shape)
        whole.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            local = parameter.to_local()
            rows = whole.chunk(run.world_size)
            local.copy_(rows[run.rank] if run.rank < len(rows) else whole[:0])


if __name__ == "__main__":
    os.makedirs(OPTIONS["out"], exist_ok=True)
    rt.run(train)
