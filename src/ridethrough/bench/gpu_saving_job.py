"""The job of `ridethrough bench gpu` that trains with and without saves: `python gpu_saving_job.py SETTINGS.json`.

One rank; real steps of a chosen length on an FSDP2 model. Blocks of steps without saves (the control) and with them
take turns; what a save costs is what it adds to the wall of its block. Prints a line `RESULT {...}` for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_modes  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict

import ridethrough as rt
from ridethrough.bench.gpu_model import batch, build
from ridethrough.checkpoint import gpu
from ridethrough.checkpoint.arena import POOL

SETTLED_STEPS = 10
WARM_UP_LIMIT_S = 90.0
KEPT = 1  # checkpoints on disk beside the one that is being written
NEVER = 1 << 40
COPY = gpu.copy_on_side_stream


class Training:
    """Model, optimizer and steps of about `step_s` seconds. What a mode wants to know of a job."""

    rank, world_size = 0, 1

    def __init__(self, settings: dict[str, Any]) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, device_id=self.device if self.cuda else None)
        self.model, self.optimizer = build(self.device, dim=settings["dim"], layers=settings["layers"], masters=True)
        self.step = 0
        self.sequences = self._sequences_for(settings["step_s"])
        self.data = batch(0, 0, self.device, self.sequences, settings["length"])
        for _ in range(3):
            self.train()
        self.bytes = sum(tensor.nbytes for tensor in self.locals().values())

    def _sequences_for(self, step_s: float) -> int:
        """So many that a step takes about so long: found by trying, since a small step is bound by the host."""
        sequences = 8
        for _ in range(4):
            self.data = batch(0, 0, self.device, sequences, SETTINGS["length"])
            self.train()
            begun = time.perf_counter()
            self.train()
            factor = step_s / (time.perf_counter() - begun)
            sequences = max(1, round(sequences * min(4.0, factor)))
        return sequences

    def train(self) -> None:
        """One step. Ends when the GPU has done it, as reading the loss makes it."""
        loss = self.model(*self.data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()

    def locals(self) -> dict[str, torch.Tensor]:
        """Plain local tensors of parameters and optimizer state, by name."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = self.local(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = self.local(value)
        return found

    @staticmethod
    def local(tensor: Any) -> torch.Tensor:
        plain: torch.Tensor = tensor.detach()
        return plain.to_local() if hasattr(plain, "to_local") else plain

    def sharded(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def block(self, num_steps: int, mode: Any = None, every: int = 0) -> dict[str, Any]:
        """So many steps, with a save after each `every` of them but the last, so that all that a save does to training
        falls inside. Seconds; `ages` of the newest durable state from the first save on."""
        self.synchronize()
        steps_s: list[float] = []
        blocked_s: list[float] = []
        ages = [0.0]
        ended: dict[int, float] = {}
        begun = last = time.monotonic()
        for number in range(1, num_steps + 1):
            self.train()
            self.step += 1
            now = ended[self.step] = time.monotonic()
            if mode is not None:
                due = every > 0 and number % every == 0 and number < num_steps
                mode.after_step(self.step, due)
                if due:
                    blocked_s.append(time.monotonic() - now)
                if every and number > every:
                    ages.append(time.monotonic() - ended.get(mode.newest_durable(), begun))
            now = time.monotonic()
            steps_s.append(now - last)
            last = now
        self.synchronize()
        return {
            "seconds": time.monotonic() - begun,
            "steps_s": steps_s,
            "blocked_s": blocked_s,
            "freshness_s": max(ages),
        }


class Ours(checkpoint_modes.Ridethrough):  # type: ignore[misc]
    """`every` is given so that snapshot memory is made ahead, as in any job; this loop itself says when to save."""

    def prepare(self) -> None:
        state = rt.State(model=self.job.model, optimizer=self.job.optimizer)
        self.checkpointer = rt.Checkpointer(self.root, state, every=NEVER, keep=self.kept, memory=self.memory)
        self.checkpointer.load()
        self.tickets: list[Any] = []
        self.copies: list[tuple[Any, Any]] = []
        gpu.copy_on_side_stream = self.timed_copy

    def begin(self, interval: int) -> None:
        self.tickets, self.copies = [], []

    def timed_copy(self, arena: Any, items: Any, after: Any, view: Any) -> Any:
        """What the copy thread queues, between two events on its stream."""
        side = gpu.side_stream(self.job.device)
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        side.wait_event(after)
        first.record(side)
        queued = COPY(arena, items, after, view)
        last.record(side)
        self.copies.append((first, last))
        return queued

    def copy_s(self) -> list[float]:
        self.job.synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in self.copies]


class OursInMemory(Ours):
    memory = 1


MODES = {**checkpoint_modes.MODES, "ridethrough": Ours, "ridethrough-memory": OursInMemory}


def warm_up(job: Training, mode: Any) -> dict[str, Any]:
    """Until all snapshot memory is registered with CUDA, and the first snapshots have been compared whole. Says what
    that cost training."""
    control_s = job.block(SETTLED_STEPS)["seconds"] / SETTLED_STEPS
    begun, steps_s = time.monotonic(), []
    settled = 0
    while settled < SETTLED_STEPS and time.monotonic() - begun < WARM_UP_LIMIT_S:
        steps_s += job.block(1, mode)["steps_s"]
        settled = settled + 1 if not job.cuda or POOL.all_pinned() else 0
    took = time.monotonic() - begun
    compared_s = []
    for _ in range(checkpoint_modes.COMPARED_SNAPSHOTS):
        if mode.memory == "off":
            mode.save(job.step)
            compared_s += job.block(1, mode)["steps_s"]
            mode.finish()
    return {
        "steps": len(steps_s),
        "seconds": took,
        "added_s": sum(steps_s) - control_s * len(steps_s),
        "longest_step_s": max(steps_s),
        "compared_steps_s": compared_s,
    }


def control(job: Training) -> float:
    """Seconds of a step without saves, by the wall of a block of them."""
    num_steps: int = SETTINGS["control_steps"]
    seconds: float = job.block(num_steps)["seconds"]
    return seconds / num_steps


def measure(job: Training, mode: Any, asked: dict[str, Any], before_s: float) -> tuple[dict[str, Any], float]:
    """A block with saves between two controls (steps' mean seconds; the first is the last one's second)."""
    every, num_steps = asked["every"], asked["steps"]
    mode.begin(every)
    block = job.block(num_steps, mode, every)
    begun = time.monotonic()
    mode.finish()
    drain_s = time.monotonic() - begun
    counts = mode.counts()
    after_s = control(job)
    control_s = (before_s + after_s) / 2
    num_saves = len(block["blocked_s"])
    added_s = block["seconds"] - control_s * num_steps
    row = {
        "every": every,
        "steps": num_steps,
        "num_saves": num_saves,
        "control_step_s": control_s,
        "control_spread": abs(after_s - before_s) / control_s,
        "seconds": block["seconds"],
        "added_s_per_step": added_s / num_steps,
        "added_s_per_save": added_s / num_saves if num_saves else None,
        "efficiency": control_s * num_steps / block["seconds"],
        "longest_step_s": max(block["steps_s"]),
        "steps_s": [round(seconds, 5) for seconds in block["steps_s"]],
        "blocked_s": [round(seconds, 5) for seconds in block["blocked_s"]],
        "drain_s": drain_s,
        "freshness_s": block["freshness_s"],
        "freshness_bound_s": 2 * counts["write_s"] + control_s * (every + 1),
        **counts,
    }
    if isinstance(mode, Ours):
        row["copy_s"] = mode.copy_s()
        row["held"], row["not_held"] = mode.checkpointer.figures.held, mode.checkpointer.figures.not_held
    return row, after_s


def loaded(job: Training, mode: Ours) -> dict[str, Any]:
    """The last save, read back into the emptied live state and compared bit for bit."""
    mode.checkpointer.save(job.step, durable=True).committed(300.0)
    mode.checkpointer.close()
    kept = {name: tensor.clone() for name, tensor in job.locals().items()}
    for tensor in job.locals().values():
        tensor.zero_()
    state = rt.State(model=job.model, optimizer=job.optimizer)
    reader = rt.Checkpointer(mode.root, state, memory="off")
    job.synchronize()
    begun = time.monotonic()
    report = reader.load()
    job.synchronize()
    seconds = time.monotonic() - begun
    reader.close()
    wrong = sum(not torch.equal(tensor, kept[name]) for name, tensor in job.locals().items())
    return {"load_s": seconds, "tier": report.tier, "wrong_tensors": wrong}


def say(**fields: Any) -> None:
    print("RESULT " + json.dumps(fields), flush=True)


def main() -> None:
    job = Training(SETTINGS)
    about = {"state_bytes": job.bytes, "sequences": job.sequences, "length": SETTINGS["length"]}
    mode = MODES[SETTINGS["mode"]](job, Path(SETTINGS["out"]) / "saves", KEPT)
    if isinstance(mode, Ours):
        say(what="warm_up", **about, **warm_up(job, mode))
    control_s = control(job)
    for rep in range(SETTINGS["reps"]):
        for asked in SETTINGS["blocks"]:
            row, control_s = measure(job, mode, asked, control_s)
            say(what="block", rep=rep, **about, **row)
    if isinstance(mode, Ours):
        say(what="load", **about, **loaded(job, mode))
    else:
        mode.close()
    os._exit(0)  # without the teardown of helpers that some modes leave behind


if __name__ == "__main__":
    SETTINGS = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    main()
