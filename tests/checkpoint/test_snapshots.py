"""Snapshots: never torn, hidden behind the next forward, synchronous where a fence is missed, let go of when
abandoned."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ridethrough.checkpoint as rc
from ridethrough.checkpoint import Checkpointer, State, compare, copier, layout


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy thread takes 30 ms a tensor, as if the state were large."""
    real = copier.copy_tensor

    def slow(*args: Any) -> bool:
        time.sleep(0.03)
        return real(*args)

    monkeypatch.setattr(copier, "copy_tensor", slow)


@pytest.mark.usefixtures("slow_copy")
def test_the_optimizer_waits_for_the_copy_and_the_snapshot_is_the_state_of_its_step(
    job: Any, tmp_path: Path, undisturbed: Any
) -> None:
    one = job()
    one.checkpointer.load()
    one.run(0, 3)
    ticket = one.checkpointer.save(3, durable=False)
    assert ticket.state == "filling"
    one.train(4)  # its optimizer step waits in the fence
    assert ticket.staged(5)
    assert ticket.committed(20)
    one.checkpointer.close(20)
    again = job()
    assert again.checkpointer.load().step == 3
    assert again.bytes() == undisturbed(3) != undisturbed(4)


@pytest.mark.usefixtures("slow_copy")
def test_without_the_fence_the_copy_is_torn_which_is_found_and_never_saved(job: Any, tmp_path: Path) -> None:
    """The negative control: an optimizer whose hooks do not run, as one step inside a compiled graph."""
    one = job()
    one.checkpointer.load()
    one.run(0, 2)
    ticket = one.checkpointer.save(2, durable=False)
    one.optimizer._optimizer_step_pre_hooks.clear()
    pending = one.checkpointer._snapshotter.pending
    one.train(3)
    pending.task.copied.wait(5)
    assert not compare.untouched(pending.arena, pending.marks)
    with pytest.warns(UserWarning, match="discarded.*synchronous from now on"):
        one.checkpointer.step(3)
    assert ticket.state == "superseded"
    assert one.checkpointer.save(3).committed(20)  # synchronous from now on, and right
    state = one.bytes()
    one.train(4)
    one.checkpointer.close(20)
    again = job()
    assert again.checkpointer.load().step == 3
    assert again.bytes() == state


def test_a_small_write_that_no_hook_tells_of_is_found_at_the_boundary(job: Any) -> None:
    """By hand, to one element between those that are sampled."""
    one = job(width=64)
    one.checkpointer.load()
    ticket = one.checkpointer.save(0, durable=False)
    one.checkpointer._snapshotter.pending.task.copied.wait(5)
    with torch.no_grad():
        one.model[0].weight.data[3, 5] += 1.0
    pending = one.checkpointer._snapshotter.pending
    assert compare.untouched(pending.arena, pending.marks), "not between the samples"
    with pytest.warns(UserWarning, match="discarded"):
        one.checkpointer.step(1)
    assert ticket.state == "superseded"


def test_a_write_between_the_boundary_and_the_fence_is_found_in_the_first_snapshots(job: Any) -> None:
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    ticket = one.checkpointer.save(1, durable=False)
    ticket_task = one.checkpointer._snapshotter.pending.task
    ticket_task.copied.wait(5)
    with torch.no_grad():
        one.model[0].weight.data[3, 5] += 1.0  # weight clipping after the save, say; `.data` leaves no version behind
    with pytest.warns(UserWarning, match="discarded"):
        one.train(2)
    assert ticket.state == "superseded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_finite_up_to_the_largest_number_and_not_beyond(
    job: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    one = job(keep=9)
    one.checkpointer.load()
    one.model.to(dtype)
    values = {1: torch.finfo(dtype).max, 2: float("inf"), 3: float("nan"), 4: -1.0}
    for step, value in values.items():
        with torch.no_grad():
            one.model[0].weight[3, 5] = value
        one.checkpointer.save(step).committed(20)
    states = {a.step: a.state for a in layout.scan(tmp_path / "ckpt")}
    assert states == {1: "committed", 2: "rejected", 3: "rejected", 4: "committed"}


def test_grown_and_replaced_state_is_planned_anew(job: Any, undisturbed: Any) -> None:
    """Rule 4: lazily made Adam state, a new parameter group, state replaced by load_state_dict."""
    one = job()
    one.checkpointer.load()
    one.checkpointer.save(0).committed(20)  # before Adam has any state
    one.run(0, 1)
    one.checkpointer.save(1).committed(20)
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    one.model.add_module("extra", nn.Linear(16, 16))
    one.optimizer.add_param_group({"params": one.model.extra.parameters()})
    one.run(1, 2)
    one.checkpointer.save(2).committed(20)
    assert one.checkpointer._snapshotter.num_plans == 3
    one.checkpointer.close(20)
    again = job()
    with pytest.raises(rc.StateMismatch, match=r"6 keys of it are not in the state|not in the state: model\.extra"):
        again.checkpointer.load()


def test_sync_mode_writes_identical_files(job: Any, tmp_path: Path) -> None:
    contents = []
    for mode in ("async", "sync"):
        one = job(root=tmp_path / mode, mode=mode, every=2)
        one.checkpointer.load()
        one.run(0, 2)
        one.train(3)
        one.checkpointer.close(20)
        folder = next((tmp_path / mode).glob("step-2.*"))
        contents.append({p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".distcp"})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 2


def test_abandon_lets_go_of_everything_and_keeps_a_whole_snapshot(job: Any, undisturbed: Any) -> None:
    """A fault in the forward pass after a save: the optimizer has not stepped, so the snapshot is whole."""
    one = job()
    one.checkpointer.load()
    one.run(0, 3)
    ticket = one.checkpointer.save(3, durable=False)
    one.model(torch.randn(4, 16))
    watched = [weakref.ref(one.model), weakref.ref(one.optimizer)]
    began = time.monotonic()
    rc.abandon(0)
    assert time.monotonic() - began < 0.5
    assert ticket.state in ("staged", "committed", "filling")
    assert ticket.committed(20) is not None
    del one.model, one.optimizer, one.state
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    again = job()
    assert again.checkpointer.load().step == 3
    assert again.bytes() == undisturbed(3)


def test_several_optimizers_shared_and_tied_and_frozen_parameters(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(1)
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
        model["b"].weight = model["a"].weight  # tied
        model["c"].weight.requires_grad_(False)
        first = torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam([model["b"].bias, model["c"].bias], lr=0.1, amsgrad=True)
        state = State(net=model, first=first, second=second, count=7)
        return model, state, (first, second)

    model, state, optimizers = build()
    one = Checkpointer(tmp_path, state, every=1)
    one.load()
    for step in range(1, 5):
        x = torch.randn(2, 8)
        (model["c"](model["b"](model["a"](x)))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state["count"] = step
        one.step(step)
    one.close(20)
    fresh, loaded, others = build()
    two = Checkpointer(tmp_path, loaded)
    assert two.load().step == 4 and loaded["count"] == 4
    assert fresh["b"].weight is fresh["a"].weight
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name
    for left, right in zip(optimizers, others, strict=True):
        for group, other in zip(left.param_groups, right.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                assert left.state[p].keys() == right.state[q].keys()
                for key, value in left.state[p].items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(right.state[q][key])), key
    two.close(5)
    manifest = next(tmp_path.glob("step-4.*/rank-0.json"))
    entries = {e["k"]: e for e in layout.unseal(manifest.read_bytes(), "")["entries"]}
    assert entries["net.a.weight"]["o"] == entries["net.b.weight"]["o"] != entries["net.c.weight"]["o"]


def test_generators_are_put_back_unless_left_out(tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]

    one = Checkpointer(tmp_path, State(x=1))
    one.load()
    one.save(1).committed(20)
    want = draw()
    one.close(5)
    two = Checkpointer(tmp_path, State(x=0))
    two.load()
    assert draw() == want
    two.close(5)
    three = Checkpointer(tmp_path, State(rng=False, x=0))
    three.load()
    assert draw() != want
    three.close(5)


@pytest.mark.parametrize(
    ("objects", "match"),
    [
        ({"a.b": 1}, "reserved"),
        ({"o": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)}, "belongs to no module"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_remedy(tmp_path: Path, objects: Any, match: str) -> None:
    with pytest.raises(rc.CheckpointError, match=match):
        Checkpointer(tmp_path, State(**objects)).save(1)
