"""Where a step ends, and what is refused: accumulated gradients, optimizers inside backward, FSDP1, too little memory,
weights that are not finite, a small /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ridethrough.checkpoint as rc
from ridethrough.checkpoint import archive, budget, layout
from ridethrough.checkpoint.arena import POOL
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.restore import load_value
from ridethrough.checkpoint.state import State, rng_state


def saved(root: Path) -> list[int]:
    return sorted(a.step for a in layout.scan(root) if a.state == "committed")


def test_a_save_waits_for_the_step_in_which_the_optimizer_has_stepped(job: Any, tmp_path: Path) -> None:
    """Gradients of three batches are added up: a state between them could not go on, the gradients are not in it."""
    one = job(every=2, keep=50)
    one.checkpointer.load()
    for step in range(1, 10):
        one.model(torch.randn(4, 16)).pow(2).mean().backward()
        if step % 3 == 0:
            one.optimizer.step()
            one.optimizer.zero_grad()
        ticket = one.checkpointer.step(step)
        if ticket is not None:
            ticket.committed(20)
    assert saved(tmp_path / "ckpt") == [3, 6, 9]
    one.checkpointer.close(20)


def test_optimizers_that_step_inside_backward_wait_for_the_copy_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    named = {f"o{i}": o for i, o in enumerate(optimizers.values())}
    one = rc.Checkpointer(tmp_path, State(model=model, **named), every=1, keep=50)
    one.load()
    states = {}
    for step in range(1, 6):
        model(torch.randn(4, 64)).pow(2).mean().backward()
        states[step] = [p.detach().clone() for p in model.parameters()]
        ticket = one.step(step)
        model(torch.randn(4, 64)).pow(2).mean().backward()  # all its optimizers go through the fence
        assert ticket is not None and ticket.committed(20)
    one.close(20)
    fresh = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    others = {f"o{i}": torch.optim.Adam([p], lr=0.1) for i, p in enumerate(fresh.parameters())}
    two = rc.Checkpointer(tmp_path, State(model=fresh, **others))
    assert two.load().step == 5
    assert all(torch.equal(a, b) for a, b in zip(states[5], fresh.parameters(), strict=True))
    two.close(5)


def test_fsdp1_is_refused_with_the_remedy(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        for model in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(
                CheckpointError, match=r"FSDP1 is not supported; use torch\.distributed\.fsdp\.fully_shard"
            ):
                State(model=model)
    finally:
        dist.destroy_process_group()


def test_shards_as_fsdp1_gives_them_are_refused_in_an_objects_state(tmp_path: Path) -> None:
    """What LOCAL and SHARDED state dicts of FSDP1 hold."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    class Wrapper:
        def state_dict(self) -> Any:
            shard = Shard.from_tensor_and_offsets(torch.ones(4), [0], 0)
            return {"weight": init_from_local_shards([shard], 4)}

        def load_state_dict(self, state: Any) -> None: ...

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one = rc.Checkpointer(tmp_path, State(model=Wrapper()))
        one.load()
        busy = POOL.num_busy()
        with pytest.raises(CheckpointError, match=r"ShardedTensor inside an object.*fully_shard"):
            one.save(1)
        assert POOL.num_busy() == busy, "a save that is refused takes no slot"
        one.abandon()
    finally:
        dist.destroy_process_group()


def test_too_little_memory_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget.POOL, "bytes_held", lambda: 0)
    monkeypatch.setattr(budget, "available_bytes", lambda: (1000, "cgroup /job"))
    assert budget.slots_for(100, 2, False) == (5, "")
    slots, said = budget.slots_for(120, 2, False)
    assert slots == 4 and "tight mode, 4 of 5 slots: a snapshot takes 120 bytes on each of 2 ranks" in said
    assert budget.slots_for(200, 2, False)[0] == 0
    with pytest.raises(CheckpointError, match=r"takes 200 bytes on each of 2 ranks.*cgroup /job has 1000 bytes left"):
        budget.slots_for(200, 2, True)


def test_the_estimate_before_the_first_step_is_the_state_after_it(job: Any) -> None:
    one = job()
    before = budget.state_bytes(one.state)
    one.checkpointer.load()
    one.run(0, 1)
    after = budget.state_bytes(one.state)
    assert abs(after - before) < 64  # the step counters


def test_a_save_of_weights_that_are_not_finite_is_never_loaded(job: Any, tmp_path: Path) -> None:
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    one.checkpointer.save(1).committed(20)
    with torch.no_grad():
        one.model[0].weight[0, 0] = float("inf")
    one.checkpointer.save(2).committed(20)
    one.checkpointer.close(20)
    (bad,) = [a for a in layout.scan(tmp_path / "ckpt") if a.step == 2]
    assert (bad.state, bad.reason) == ("rejected", "its weights are not all finite numbers")
    with pytest.warns(UserWarning, match="not all finite"):
        assert job().checkpointer.load().step == 1


def test_values_are_packed_as_torch_would_read_them() -> None:
    assert archive.works()
    value = {"rng": rng_state(), "f": 1.5, "n": None, "t": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}
    back = load_value(archive.pack(value))
    assert back["rng"]["python"] == value["rng"]["python"]
    assert torch.equal(back["rng"]["torch"], value["rng"]["torch"]) and torch.equal(back["t"], value["t"])


@pytest.mark.root
def test_a_small_dev_shm_is_nothing_to_a_save(tmp_path: Path) -> None:
    """Case A03: 16 MB of state where /dev/shm has 4 MB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small /dev/shm needs root")
    script = tmp_path / "save.py"
    script.write_text(
        "import torch, ridethrough.checkpoint as rc\n"
        "model = torch.nn.Linear(2000, 2000)\n"
        f"one = rc.Checkpointer({str(tmp_path / 'c')!r}, rc.State(model=model))\n"
        "one.load()\n"
        "assert one.save(1).committed(30)\n"
        "one.close(10)\n"
    )
    command = f"mount -t tmpfs -o size=4m tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mount namespace here")
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "c") == [1]
