"""Which samples a step sees: a pure function of seed, step and rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ridethrough.train.corpus import DataError, Tokens, load_corpus
from ridethrough.train.data import StepLoader, StepSampler, Windows, shuffled


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_bytes(bytes(1 + i * 7 % 251 for i in range(5000)))
    return load_corpus(str(file)).train


def loader(tokens: Tokens, **changed: Any) -> StepLoader:
    options = {"seq_len": 16, "batch_size": 3, "rank": 1, "world_size": 2, "seed": 4, "num_workers": 0}
    return StepLoader(tokens, **{**options, **changed})


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_the_shuffle_is_a_permutation(size: int) -> None:
    order = [shuffled(i, size, b"key") for i in range(size)]
    assert sorted(order) == list(range(size))
    if size > 3:
        assert order != list(range(size))
        assert order != [shuffled(i, size, b"other") for i in range(size)]


def test_each_epoch_holds_each_window_once_over_all_ranks() -> None:
    ranks = [StepSampler(64, batch_size=4, rank=r, world_size=2, seed=0) for r in range(2)]
    epochs = [[i for s in range(8 * e + 1, 8 * e + 9) for r in ranks for i in r.indices(s)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(64))
    assert epochs[0] != epochs[1]


def test_a_fixed_global_batch_is_the_same_at_any_world_size() -> None:
    def seen(world_size: int) -> list[int]:
        ranks = [
            StepSampler(100, batch_size=12 // world_size, rank=r, world_size=world_size, seed=9)
            for r in range(world_size)
        ]
        return [i for r in ranks for i in r.indices(17)]

    assert seen(1) == seen(2) == seen(4)


def test_targets_are_the_inputs_moved_by_one(tokens: Tokens) -> None:
    inputs, targets = Windows(tokens, 16)[5]
    assert inputs.tolist() == tokens.window(80, 16).tolist()
    assert targets.tolist() == tokens.window(81, 16).tolist()
    assert inputs.dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_same_batches_whatever_the_workers(tokens: Tokens, workers: int) -> None:
    whole = loader(tokens)
    expected = [next(whole) for _ in range(8)]
    first = loader(tokens, num_workers=workers)
    for _ in range(3):
        next(first)
    state = first.state_dict()  # the workers have fetched ahead by now
    first.close()
    assert state["step"] == 3
    second = loader(tokens, num_workers=2 - workers)
    second.load_state_dict(state)
    for inputs, targets in expected[3:]:
        got = next(second)
        assert torch.equal(got[0], inputs)
        assert torch.equal(got[1], targets)
    second.close()


def test_resuming_reads_nothing_of_what_was_skipped(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Windows.__getitem__
    monkeypatch.setattr(Windows, "__getitem__", lambda self, i: (read.append(i), original(self, i))[1])
    resumed = loader(tokens)
    resumed.load_state_dict({**resumed.state_dict(), "step": 5000})
    next(resumed)
    assert len(read) == 3


def test_starting_the_loader_draws_no_global_random_number(tokens: Tokens) -> None:
    before = torch.get_rng_state()
    next(loader(tokens))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_other_data_is_refused(tokens: Tokens) -> None:
    own = loader(tokens, fingerprint="a")
    with pytest.raises(DataError, match="--data"):
        own.load_state_dict({**own.state_dict(), "fingerprint": "b"})
    with pytest.raises(DataError, match="--seed"):
        own.load_state_dict({**own.state_dict(), "seed": 5})
    with pytest.warns(UserWarning, match="global batch was 8, now 6"):
        own.load_state_dict({**own.state_dict(), "global_batch": 8, "step": 2})
    assert own.step == 2


def test_workers_end_with_close(tokens: Tokens, tmp_path: Path) -> None:
    here = psutil.Process(os.getpid())
    before = set(here.children())
    own = loader(tokens, num_workers=2)
    next(own)
    workers = set(here.children()) - before
    assert len(workers) >= 2
    own.close()
    deadline = time.monotonic() + 20
    while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
