"""Train a Llama on text, through faults:

    ridethrough train --nproc-per-node 4 --preset tiny --steps 200     # protected
    python -m ridethrough.train --preset tiny --steps 200              # one plain process

`train` is entered once per generation and builds everything anew; what it needs of the past is in the checkpoint.
First weights and the samples of a step are pure functions of the seed, and ranks add up gradients in their order, so a
run that met faults ends bit for bit where an undisturbed one of the same world size does.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ridethrough.checkpoint import Checkpointer, State
from ridethrough.train.config import TrainConfig
from ridethrough.train.corpus import load_corpus
from ridethrough.train.data import Batch, StepLoader, fixed_batches
from ridethrough.train.fingerprint import state_hash
from ridethrough.train.model import Llama
from ridethrough.train.sharding import fill, reshard, seeded, shard

if TYPE_CHECKING:
    from ridethrough.restart import Run


def train(run: Run, config: TrainConfig) -> None:
    """One generation of the reference job. Main thread of every rank; the process group is up.

    Logs `loss` (nats per token, mean over all ranks) and `tokens` (of all ranks) for each step, and records "final"
    with `final_hash`, `final_loss` and `val_loss` after the last one. Leaves nothing behind in the process.
    """
    device = run.device
    if device.type == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)  # ranks that share a machine would fight for its cores
    torch.manual_seed(config.seed * 1_000_003 + run.rank)  # dropout differs between ranks

    # Data: bytes or token ids, mapped from files; the loader's whole state is the number of the step.
    corpus = load_corpus(config.data)
    batch: dict[str, int] = {
        "seq_len": config.seq_len,
        "batch_size": config.rank_batch_size(run.world_size),
        "rank": run.rank,
        "world_size": run.world_size,
    }
    loader = StepLoader(
        corpus.train,
        seed=config.seed,
        num_workers=config.loader_workers,
        pin_memory=device.type == "cuda",
        fingerprint=corpus.fingerprint,
        **batch,
    )
    run.on_leave(loader.close)
    validation = fixed_batches(corpus.validation, config.eval_batches, **batch)

    # Model: built without memory, split over the ranks, then each rank gets memory for its own shards only.
    shape = config.model()
    with torch.device("meta"):
        model = Llama(shape, dropout=config.dropout, recompute=config.activation_checkpointing)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    mesh = init_device_mesh(device.type, (run.world_size,))
    shard(model, mesh, torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    model.to_empty(device=device)
    optimizer = adamw(model, config)

    # State: everything that the next step depends on. First weights are made only if nothing was saved yet.
    progress = Progress()
    state = State(rng=config.restore_rng, model=model, optimizer=optimizer, loader=loader, progress=progress)
    checkpointer = Checkpointer(
        config.checkpoints(run.run_dir),
        state,
        every=config.checkpoint_every or None,
        keep=config.keep,
        mode=config.checkpoint_mode,
        memory=config.memory_every(),
    )
    with run.phase("load"):
        loaded = checkpointer.load()
    if loaded.step == 0:
        if config.init_from is None:
            fill(model, seeded(config.seed, shape.num_layers))
        else:
            from ridethrough.train.hf import pretrained

            fill(model, pretrained(config.init_from))

    step = loaded.step
    for step in run.steps(loaded, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        with run.phase("data"):
            inputs, targets = to_device(next(loader), device)
        with run.phase("forward"):
            loss = model.loss(model(inputs), targets)
        with run.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with run.phase("optimizer"):
            if config.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad()
        progress.loss = mean_over_ranks(loss)
        run.log(loss=progress.loss, tokens=targets.numel() * run.world_size)
        if validation and (step == config.steps or (config.eval_every and step % config.eval_every == 0)):
            with run.phase("eval"):
                progress.val_loss = evaluate(model, validation, device)
            run.log(val_loss=progress.val_loss)
        if run.rank == 0 and config.log_every and (step % config.log_every == 0 or step == config.steps):
            validated = "" if math.isnan(progress.val_loss) else f" val {progress.val_loss:.4f}"
            print(f"step {step}/{config.steps} loss {progress.loss:.4f}{validated}", flush=True)

    loader.close()
    if step == config.steps:  # otherwise a planned stop: the next job goes on from the last save
        run.record(
            "final",
            final_hash=state_hash(model, optimizer),
            final_loss=progress.loss,
            val_loss=None if math.isnan(progress.val_loss) else progress.val_loss,
        )


@dataclass
class Progress:
    """The last losses, part of the state: a job that resumes after its last step still knows them."""

    loss: float = math.nan
    val_loss: float = math.nan

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.val_loss = state["loss"], state["val_loss"]


def adamw(model: Llama, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only (Loshchilov and Hutter 2019)."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.highest_lr(), betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of `step` (1-based): linear up over `warmup` steps, then half a cosine down to its last value."""
    high = config.highest_lr()
    if step <= config.warmup:
        return high * step / config.warmup
    part = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = high * config.min_lr_ratio
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * part))


@torch.no_grad()
def evaluate(model: Llama, batches: list[Batch], device: torch.device) -> float:
    """Mean loss of fixed validation batches over all ranks. Collective; changes no state, draws no random number."""
    model.eval()
    losses = [model.loss(model(inputs), targets) for inputs, targets in (to_device(b, device) for b in batches)]
    model.train()
    reshard(model)
    return mean_over_ranks(torch.stack(losses).mean())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move (inputs, targets); from pinned memory without waiting."""
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


def mean_over_ranks(value: Tensor) -> float:
    """Collective; waits for the device."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
