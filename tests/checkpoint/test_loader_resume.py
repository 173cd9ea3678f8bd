"""Case C55: a resume far into the data reads none of what it skips."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ridethrough.checkpoint import Checkpointer, State
from ridethrough.train.data import StepLoader


class Counting(torch.utils.data.Dataset[Any]):
    """20 ms for each item."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        time.sleep(0.02)
        return torch.tensor(index), torch.tensor(index)


def step_loader(data: Counting) -> StepLoader:
    tokens: Any = numpy.zeros(4000 + 1, dtype=numpy.uint16)
    loader = StepLoader(tokens, seq_len=1, batch_size=4, rank=0, world_size=1, seed=0)
    loader.windows = data  # type: ignore[assignment]
    return loader


class Stateful:
    """torchdata's loader, drawn from as an iterator."""

    def __init__(self, data: Counting) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader: Any = StatefulDataLoader(data, batch_size=4, shuffle=False)
        self.batches: Any = None

    def __next__(self) -> Any:
        if self.batches is None:
            self.batches = iter(self.loader)
        return next(self.batches)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


@pytest.mark.parametrize("make", [step_loader, Stateful])
def test_c55_what_is_skipped_is_not_read(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Counting()
    loader = make(data)
    one = Checkpointer(tmp_path, State(loader=loader))
    one.load()
    with monkeypatch.context() as fast:
        fast.setattr(time, "sleep", lambda _s: None)
        for _ in range(500):
            next(loader)
    assert one.save(500).committed(20)
    one.close(20)
    want = next(loader)[0].tolist()
    data.read.clear()
    loader = make(data)
    two = Checkpointer(tmp_path, State(loader=loader))
    assert two.load().step == 500
    assert next(loader)[0].tolist() == want
    assert sorted(data.read) == sorted(want)
    two.close(5)
