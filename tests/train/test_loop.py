"""The loop in one process: what it learns, records and repeats bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridethrough.train.config import TrainConfig
from ridethrough.train.corpus import load_corpus
from ridethrough.train.data import StepLoader
from ridethrough.train.loop import learning_rate, train

pytestmark = pytest.mark.usefixtures("alone", "one_thread")


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def job(recording_run: Any, tmp_path: Path) -> Any:
    """job(folder, stop_after=None, **options) -> the run, after training."""

    def go(folder: str, stop_after: int | None = None, **options: Any) -> Any:
        small = {"num_layers": 1, "seq_len": 32, "steps": 6, "warmup": 2, "eval_every": 4, "eval_batches": 2}
        config = TrainConfig(**{**small, "log_every": 0, "checkpoint_every": 2, **options})
        run = recording_run(tmp_path / folder, stop_after)
        train(run, config)
        return run

    return go


def losses(run: Any) -> list[float]:
    return [run.logged[step]["loss"] for step in sorted(run.logged)]


def test_phases_metrics_and_the_final_record(job: Any) -> None:
    run = job("a")
    step = [(phase, 1) for phase in ("data", "forward", "backward", "optimizer")]
    assert run.phases[:5] == [("load", 0), *step]
    assert [s for phase, s in run.phases if phase == "eval"] == [4, 6]
    assert run.logged[1]["tokens"] == 2 * 32
    final = run.recorded["final"]
    assert final["final_loss"] == run.logged[6]["loss"]
    assert final["val_loss"] == run.logged[6]["val_loss"]
    assert len(final["final_hash"]) == 32


def test_two_runs_are_equal_bit_for_bit_and_a_seed_makes_another(job: Any) -> None:
    a, b, other = job("a", dropout=0.1), job("b", dropout=0.1), job("c", dropout=0.1, seed=1)
    assert losses(a) == losses(b) != losses(other)
    assert a.recorded["final"] == b.recorded["final"]
    assert a.recorded["final"]["final_hash"] != other.recorded["final"]["final_hash"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(job: Any, workers: int) -> None:
    whole = job("a", dropout=0.1)
    job("b", dropout=0.1, stop_after=4)
    resumed = job("b", dropout=0.1, loader_workers=workers)
    assert sorted(resumed.logged) == [5, 6]
    assert losses(resumed) == losses(whole)[4:]
    assert resumed.recorded["final"] == whole.recorded["final"]


def test_without_the_random_streams_it_does_not(job: Any) -> None:
    whole = job("a", dropout=0.1)
    job("b", dropout=0.1, stop_after=4, restore_rng=False)
    resumed = job("b", dropout=0.1, restore_rng=False)
    assert resumed.recorded["final"]["final_hash"] != whole.recorded["final"]["final_hash"]


def test_a_job_that_has_nothing_left_to_do_still_knows_its_losses(job: Any) -> None:
    whole, again = job("a"), job("a")
    assert again.logged == {}
    assert again.recorded["final"] == whole.recorded["final"]


def test_recomputing_activations_changes_nothing_and_bf16_little(job: Any) -> None:
    plain, recomputed, rounded = job("a"), job("b", activation_checkpointing=True), job("c", dtype="bf16")
    assert losses(recomputed) == losses(plain)
    assert losses(rounded) == pytest.approx(losses(plain), abs=0.02)
    assert losses(rounded) != losses(plain)


def test_a_job_starts_from_pretrained_weights(job: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'ridethrough[hf]'")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    )
    theirs.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    run = job("a", num_layers=None, init_from=str(tmp_path / "llama"), steps=1)
    tokens = load_corpus(None).train
    inputs, targets = next(StepLoader(tokens, seq_len=32, batch_size=2, rank=0, world_size=1, seed=0))
    expected = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    assert run.logged[1]["loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_nothing_of_the_model_outlives_the_function(job: Any) -> None:
    import gc

    job("a")
    gc.collect()
    from ridethrough.train.model import Llama

    assert not [o for o in gc.get_objects() if type(o) is Llama]
    assert dist.is_initialized()


def test_tiny_learns_the_standard_library(job: Any) -> None:
    run = job("a", num_layers=None, seq_len=128, steps=60, warmup=10, batch_size=4, checkpoint_every=0)
    assert losses(run)[0] == pytest.approx(math.log(256), abs=0.2)
    assert run.recorded["final"]["val_loss"] < 3.0


def test_learning_rate_warms_up_and_falls_to_its_part() -> None:
    config = TrainConfig(lr=1.0, warmup=10, steps=110, min_lr_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
