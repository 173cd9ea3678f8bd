"""Two real ranks (gloo, FSDP2), started as torchrun would: the same hash on both, at rest and across a restart."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

_STOPPER = """
import os

def install(run):
    def at(phase, step):
        if (phase, step) == ("backward", 5):
            os._exit(9)
    run.observe(at)
"""

_SHARDS = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ridethrough.train.config import TrainConfig
from ridethrough.train.model import Llama
from ridethrough.train.sharding import fill, local_rows, seeded, shard

init_from = sys.argv[1] if len(sys.argv) > 1 else None
if init_from:
    from ridethrough.train.hf import pretrained
    rows = pretrained(init_from)
else:
    rows = seeded(7, 2)
dist.init_process_group("gloo")

def check():  # a function, so that nothing of the group is alive when the interpreter ends
    with torch.device("meta"):
        model = Llama(TrainConfig(init_from=init_from).model())
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), torch.float32)
    model.to_empty(device="cpu")
    asked = []
    fill(model, lambda name, shape, first, count: (asked.append(count / shape[0]), rows(name, shape, first, count))[1])
    assert all(part <= 0.6 for part in asked), asked
    held = sum(local_rows(p)[0].numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert held <= 0.51 * whole, (held, whole)
    for name, parameter in model.named_parameters():
        expected = rows(name, parameter.shape, 0, parameter.shape[0])
        assert torch.equal(parameter.full_tensor(), expected), name
    print("equal", flush=True)

check()
dist.destroy_process_group()
"""


def ranks(world_size: int, argv: list[str], cwd: Path, **extra: str) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keep = {k: v for k, v in os.environ.items() if not k.startswith("RIDETHROUGH_")}
    env = {**keep, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    env |= {"RIDETHROUGH_AGENT": "none"}  # one generation, as plain as can be
    env |= {"LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd), **extra}
    if old := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + old
    started = [
        subprocess.Popen(
            [sys.executable, *argv],
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for r in range(world_size)
    ]
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=120)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return done


def train(folder: Path, world_size: int, *options: str, **extra: str) -> list[dict[str, Any]]:
    """Run the reference job; all events of all ranks, by rank and time."""
    folder.mkdir(exist_ok=True)
    argv = ["-m", "ridethrough.train", "--num-layers=1", "--seq-len=32", "--steps=8", "--warmup=2", "--dropout=0.1"]
    argv += ["--checkpoint-every=4", "--checkpoint-mode=sync", "--eval-every=4", "--log-every=0", *options]
    results = ranks(world_size, argv, folder, RIDETHROUGH_RUN_DIR=str(folder), **extra)
    if not extra:
        assert [r.returncode for r in results] == [0] * world_size, results[0].stderr + results[-1].stderr
    files = sorted((folder / "events").glob("*.jsonl"))
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [e for e in events if e["kind"] != "header"]


def finals(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(e["final_hash"], e["final_loss"], e["val_loss"]) for e in events if e["kind"] == "final"]


@pytest.mark.campaign
def test_a_restarted_job_ends_bit_for_bit_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole = finals(train(tmp_path / "whole", 2))
    assert len(whole) == 2
    assert whole[0] == whole[1]

    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "stopper.py").write_text(_STOPPER)
    assert finals(train(tmp_path / "cut", 2, RIDETHROUGH_OBSERVERS="stopper:install")) == []
    events = train(tmp_path / "cut", 2)
    assert {e["step"] for e in events if e["kind"] == "step"} == set(range(1, 9))
    assert finals(events) == whole


@pytest.mark.campaign
def test_a_fixed_global_batch_gives_the_same_losses_at_any_world_size(tmp_path: Path) -> None:
    losses = []
    for world_size in (1, 2):
        options = ("--dropout=0", "--global-batch-size=4", "--steps=4")
        events = train(tmp_path / str(world_size), world_size, *options)
        losses.append([e["loss"] for e in events if e["kind"] == "step" and e["rank"] == 0])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_no_rank_holds_more_than_its_shards_and_their_values_do_not_depend_on_the_world(tmp_path: Path) -> None:
    (tmp_path / "shards.py").write_text(_SHARDS)
    for result in ranks(2, ["shards.py"], tmp_path):
        assert (result.stdout, result.returncode) == ("equal\n", 0), result.stderr


def test_each_rank_reads_its_own_slices_of_pretrained_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'ridethrough[hf]'")
    config = transformers.LlamaConfig(
        vocab_size=257,  # splits unevenly
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    (tmp_path / "shards.py").write_text(_SHARDS)
    for result in ranks(2, ["shards.py", "llama"], tmp_path):
        assert (result.stdout, result.returncode) == ("equal\n", 0), result.stderr
