"""Loaders that are not ours but have a `state_dict` are part of the state: no sample twice, none left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridethrough.checkpoint import Checkpointer, State


class CountingLoader:
    """What a user may write: an iterator whose state is a number."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> CountingLoader:
        return self

    def __next__(self) -> list[int]:
        self.position += 1
        return [self.position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def stateful(workers: int) -> Any:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="needs the extra hf: pip install 'ridethrough[hf]'"
    )
    # The shuffle draws from torch's global stream, which is part of the state. With a generator of its own and no
    # workers, torchdata 0.11 does not store that generator: epochs after the one of the save come in another order.
    return torchdata.StatefulDataLoader(list(range(64)), batch_size=4, shuffle=True, num_workers=workers)


def endless(loader: Any) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield torch.as_tensor(batch).tolist()


def train(make: Any, root: Path, until: int, seed: int = 5) -> dict[int, list[int]]:
    """Steps up to `until`, saving each fourth; step -> samples. Stops without a last save, as a killed process does."""
    torch.manual_seed(seed)
    loader = make()  # torchdata's sampler draws when it is made
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    checkpointer = Checkpointer(root, State(model=layer, optimizer=optimizer, loader=loader), every=4, mode="sync")
    loaded = checkpointer.load()
    batches, seen = endless(loader), {}
    for step in range(loaded.step + 1, until + 1):
        seen[step] = next(batches)
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step)
    checkpointer.close()
    return seen


@pytest.mark.parametrize("make", [CountingLoader, lambda: stateful(0), lambda: stateful(2)], ids=["own", "0", "2"])
def test_a_resumed_loader_goes_on_where_the_saved_one_stood(make: Any, tmp_path: Path) -> None:
    whole = train(make, tmp_path / "whole", 20)
    cut = train(make, tmp_path / "cut", 10)
    resumed = train(make, tmp_path / "cut", 20, seed=99)
    assert sorted(resumed) == list(range(9, 21))
    assert {**cut, **resumed} == whole
    if make is not CountingLoader:
        assert sorted(sample for step in range(1, 17) for sample in whole[step]) == list(range(64))
