"""A run that needs no launcher: what `train` asks of `rt.Run`, kept in lists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


class RecordingRun:
    """World 1 on the CPU. `phases` lists (name, step); `steps` stops the job after `stop_after`, as a fault would."""

    def __init__(self, run_dir: Path, stop_after: int | None = None) -> None:
        self.run_dir, self.stop_after = run_dir, stop_after
        self.generation, self.rank, self.local_rank, self.world_size, self.step = 1, 0, 0, 1, 0
        self.device, self.stopping = torch.device("cpu"), False
        self.phases: list[tuple[str, int]] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.recorded: dict[str, dict[str, Any]] = {}

    def steps(self, loaded: Any, total: int) -> Iterator[int]:
        for self.step in range(loaded.step + 1, total + 1):
            yield self.step
            loaded.checkpointer.step(self.step)
            if self.step == self.stop_after:
                break
        loaded.checkpointer.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append((name, self.step))
        yield

    def log(self, **metrics: float) -> None:
        self.logged.setdefault(self.step, {}).update(metrics)

    def record(self, kind: str, **fields: Any) -> None:
        self.recorded[kind] = fields

    def on_leave(self, callback: Callable[[], None]) -> None:
        pass


@pytest.fixture
def recording_run() -> type[RecordingRun]:
    return RecordingRun


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
