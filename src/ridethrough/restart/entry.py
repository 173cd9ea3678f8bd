"""`rt.run`: from a plain function to one that is called once per generation until the job is done."""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.ledger.recorder import Recorder
from ridethrough.restart.generation import Place, Stage
from ridethrough.restart.run_object import Run
from ridethrough.restart.session import Session, device_of, observers
from ridethrough.restart.side_agent import join

_T = TypeVar("_T")


def run(
    train: Callable[[Run], _T],
    *,
    process_group: bool = True,
    timeout_s: float = 600.0,
    max_restarts: int = 100,
    min_world_size: int | None = None,
    check: Callable[[], object] | None = None,
) -> _T:
    """Calls `train(run)` once per generation; returns what it returned in the generation that finished the job.

    Call it in the main thread of the script. A fault on any rank ends the generation on all of them: this function then
    takes `train` back (by its collectives failing, at a step boundary, or by an exception raised in it), waits for the
    next plan and calls it again. `ridethrough run` also replaces processes. Started by torchrun, srun, mpirun or as one
    plain process, an agent is started beside the ranks, and exceptions and blocked collectives are survived; only there
    do `max_restarts` and `min_world_size` (by default no rank may be missing) apply. RIDETHROUGH_AGENT=none turns that
    off: `train` is called once.

    `process_group`: make the default process group before each call (gloo, and NCCL on GPUs; `timeout_s` is its
    timeout) and destroy it after; with False the script does that itself. `check`: a health check of your own, called
    in a thread before a generation is entered again, for a second at most: if it raises, or returns False or a text,
    this process is replaced. Raises what `train` raised if that ends the job and no launcher reports it; SystemExit
    with the job's code if another rank's fault does.
    """
    agent = os.environ.get("RIDETHROUGH_AGENT", "")
    if agent == "none":
        return _once(train, process_group, timeout_s)
    if not agent:
        join(max_restarts=max_restarts, min_world_size=min_world_size)
    return Session(process_group=process_group, timeout_s=timeout_s, check=check).loop(train)


def restartable(train: Callable[[Run], _T]) -> Callable[[], _T]:
    """Decorator: `@rt.restartable` on `def train(run)` makes `train()` do what `rt.run(train)` does."""

    @functools.wraps(train)
    def call() -> _T:
        return run(train)

    return call


_page: HeartbeatPage | None = None


def heartbeat(step: int | None = None) -> None:
    """For a script that does not use `rt.run`: tells the launcher that this rank makes progress. Costs about 1 us;
    does nothing where no launcher watches."""
    global _page
    path = os.environ.get("RIDETHROUGH_HEARTBEAT")
    if path is None:
        return
    if _page is None:
        _page = HeartbeatPage(Path(path))
    _page.stamp("beat_ns", time.monotonic_ns())
    if step is not None:
        _page.stamp("step", step)


def _once(train: Callable[[Run], _T], process_group: bool, timeout_s: float) -> _T:
    """No agent wanted: one generation, with whatever ranks the environment names."""
    env = os.environ
    place = Place(
        epoch=0,
        generation=1,
        rank=int(env.get("RANK", 0)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        group_rank=int(env.get("GROUP_RANK", 0)),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", 0)),
        prefix="",
        restarts=0,
        resume={},
        policy=Policy(),
    )
    run_dir = Path(env["RIDETHROUGH_RUN_DIR"]) if "RIDETHROUGH_RUN_DIR" in env else None
    device = device_of(place)
    current = Run(
        place,
        device,
        Stage(1),
        run_dir=run_dir,
        recorder=Recorder(run_dir, "worker"),
        page=None,
        interrupter=None,
    )
    for install in observers():
        install(current)
    own_group = process_group and not dist.is_initialized()
    if own_group:
        _init_from_environment(place, device, timeout_s)
    try:
        current.record("enter")
        return train(current)
    finally:
        if own_group and dist.is_initialized():
            dist.destroy_process_group()


def _init_from_environment(place: Place, device: torch.device, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = None
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
