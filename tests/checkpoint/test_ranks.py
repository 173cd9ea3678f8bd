"""Real ranks over gloo: resume is bitwise, files are DCP's, and what dies in the middle costs no more than it
must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridethrough.checkpoint import layout
from ridethrough.checkpoint.inspect import verify

pytestmark = pytest.mark.ranks

_LOAD_PLAIN = """
import sys, hashlib, torch, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
width = 32
model = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(2 * width, width - 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
a, b = get_state_dict(model, optimizer)
state = {"model": a, "optimizer": b}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
found = hashlib.sha256()
tensors = list(model.parameters()) + [v for s in optimizer.state.values() for _k, v in sorted(s.items())]
for tensor in tensors:
    found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
print(found.hexdigest(), optimizer.param_groups[0]["lr"])
"""


def committed(root: Path) -> list[int]:
    return [a.step for a in layout.scan(root) if a.state == "committed"]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_resume_after_a_kill_is_bitwise_and_plain_dcp_reads_the_files(ranks: Any, tmp_path: Path, kind: str) -> None:
    straight = ranks(2, root=str(tmp_path / "a"), kind=kind, total=12, every=5)
    died = ranks(2, root=str(tmp_path / "b"), kind=kind, total=12, durable=[5], die={"step": 8, "ranks": [0, 1]})
    again = ranks(2, root=str(tmp_path / "b"), kind=kind, total=12, every=5)
    assert [code for code, _ in straight + again] == [0] * 4
    assert [code for code, _ in died] == [-9, -9]
    for (_, want), (_, got) in zip(straight, again, strict=True):
        assert got["loaded"] == 5 and got["note"] == want["note"]
        assert (got["hash"], got["draw"]) == (want["hash"], want["draw"])
    assert committed(tmp_path / "b") == [10, 5]
    if kind == "fsdp":
        folder = next((tmp_path / "b").glob("step-5.*"))
        plain = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _LOAD_PLAIN, str(folder)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert plain.stdout.split() == [again[0][1]["loaded_hash"], str(1e-2 * 0.99**5)], plain.stderr


def test_the_last_save_is_made_on_all_ranks_though_one_had_no_slot_for_it(ranks: Any, tmp_path: Path) -> None:
    """By all once more, when they close: none waits for the part that never comes."""
    found = ranks(2, root=str(tmp_path), total=4, every=2, crowd=1)
    assert [code for code, _ in found] == [0, 0], found
    assert committed(tmp_path) == [4, 2]
    assert [result["figures"]["skipped"] for _, result in found] == [0, 1]
    assert all("error" not in result for _, result in found)


def test_replicated_state_is_stored_once_over_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2, root=str(tmp_path), kind="ddp", total=2, every=2, width=512)
    folder = next(tmp_path.glob("step-2.*"))
    images = [os.path.getsize(folder / f"__{rank}_0.distcp") for rank in range(2)]
    parameters = 3 * 4 * (512 * 1024 + 1024 + 1024 * 511 + 511)
    assert parameters < sum(images) < 1.05 * parameters
    assert max(images) < 0.75 * sum(images)


def test_other_world_sizes_read_and_continue_alike(ranks: Any, tmp_path: Path) -> None:
    """Case B38: trained by 2 ranks, then 1, 3 and 2; the losses are those of 2 ranks all along."""
    fixed = ranks(2, root=str(tmp_path / "a"), total=12, dropout=0.0)[0][1]
    losses: list[float] = []
    held = None
    for world, total in ((2, 3), (1, 6), (3, 9), (2, 12)):
        found = [r for _, r in ranks(world, root=str(tmp_path / "b"), total=total, durable=[total], dropout=0.0)]
        assert {r["loaded"] for r in found} == {total - 3}
        assert held is None or {r["loaded_hash"] for r in found} == {held}
        assert world != 3 or any("took rank 0's" in note for note in found[2]["notes"])
        held = found[0]["full_hash"]
        losses += found[0]["losses"]
    assert losses == pytest.approx(fixed["losses"], rel=1e-6)


def test_a_step_saved_by_two_and_again_by_one_mixes_nothing(ranks: Any, tmp_path: Path) -> None:
    """Case B38: what two ranks saved of step 3 is damaged, so one rank does it again; its shards alone are read."""
    for total in (2, 3):
        ranks(2, root=str(tmp_path), total=total, durable=[total])
    os.truncate(next(tmp_path.glob("step-3.*/__1_0.distcp")), 100)
    one = ranks(1, root=str(tmp_path), total=3, durable=[3])[0][1]
    assert one["loaded"] == 2
    both = [r for _, r in ranks(2, root=str(tmp_path), total=3)]
    assert {(r["loaded"], r["loaded_hash"]) for r in both} == {(3, one["full_hash"])}


def test_a_generation_left_by_a_fault_resumes_in_the_same_processes(ranks: Any, tmp_path: Path) -> None:
    straight = ranks(2, root=str(tmp_path / "a"), total=10)
    faulty = ranks(2, root=str(tmp_path / "b"), total=10, every=2, fault=7, generations=2)
    assert [code for code, _ in faulty] == [0, 0]
    for (_, want), (_, got) in zip(straight, faulty, strict=True):
        assert got["loaded"] == 6, got["stderr"]
        assert (got["hash"], got["draw"]) == (want["hash"], want["draw"])
    assert sorted(p.name for p in tmp_path.glob("b/gen-*")) == ["gen-0.0.json", "gen-0.1.json"]


def test_twenty_saves_in_a_row_all_load_and_one_rank_commits(ranks: Any, tmp_path: Path) -> None:
    """Case A08 (four ranks, none of which is in step with the others, share one folder): every commit is whole and one
    rank's alone, nothing is left over."""
    results = ranks(4, root=str(tmp_path), total=20, every=1, keep=20, mode="sync", sleep_up_to=0.05)
    assert [code for code, _ in results] == [0] * 4
    attempts = layout.scan(tmp_path)
    assert [a.step for a in attempts] == list(range(20, 0, -1))
    assert {a.state for a in attempts} == {"committed"}
    assert [verify(attempt) for attempt in attempts] == [""] * 20
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith((".tmp", ".failed"))]


def test_every_rank_its_own_keeper_as_on_many_nodes(ranks: Any, tmp_path: Path) -> None:
    """Ranks that believe they are on different hosts share nothing but the file system."""
    results = ranks(3, root=str(tmp_path), total=12, every=2, env={"TRAINEE_OWN_HOST": "1"}, sleep=0.05, durable=[11])
    assert [code for code, _ in results] == [0, 0, 0]
    assert all("error" not in r for _, r in results), results
    steps = committed(tmp_path)
    assert 11 in steps and 12 in steps
    again = ranks(3, root=str(tmp_path), total=12)
    assert [r["loaded"] for _, r in again] == [12] * 3
    assert [r["loaded_hash"] for _, r in again] == [results[0][1]["full_hash"]] * 3
