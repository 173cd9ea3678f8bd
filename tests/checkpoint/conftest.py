"""A small training state in this process, and real ranks running `trainee.py`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridethrough.checkpoint import Checkpointer, State

HERE = Path(__file__).parent


def _load(name: str, path: Path) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# The launch tests' way to start real jobs, and to see that nothing of them is left.
launch_job = _load("launch_job", HERE.parent / "launch" / "job.py")
_load("launch_namespaces", HERE.parent / "launch" / "namespaces.py")
memory_runs = _load("memory_runs", HERE / "memory_runs.py")
_load("trainee", HERE / "trainee.py")
start_ranks = _load("ranks_of_trainee", HERE / "ranks_of_trainee.py").start_ranks


def _commands(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in pids]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """A launch_job.Job in a folder of its own."""
    with launch_job.Job(tmp_path) as job:
        yield job
        wait = launch_job.wait_until
        wait(lambda: not job.alive(), lambda: f"processes are left: {_commands(job.alive())}", 45.0)
        # A killed rank's own temporary folders (multiprocessing's) are not ours.
        wait(lambda: not list(job.temporary.glob("ridethrough-*")), "files are left", 20.0)


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rank -> step -> note of 46 steps of `epochs_job.py` with one loader, without faults."""
    with launch_job.Job(tmp_path_factory.mktemp("control")) as job:
        process = memory_runs.run(job, "control", steps=46, loaders=False, every=None)
        assert job.wait(process) == 0, job.text()
        return [memory_runs.notes(job, "control", rank) for rank in range(2)]


class Job:
    """One rank, no process group: dropout, batch norm, Adam. The state after step s is a pure function of s."""

    def __init__(self, root: Path, width: int = 16, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = State(model=self.model, optimizer=self.optimizer, note="n")
        self.checkpointer = Checkpointer(root, self.state, **options)
        self.width = width

    def train(self, step: int) -> None:
        self.model(torch.randn(4, self.width)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, start: int, stop: int) -> None:
        for step in range(start + 1, stop + 1):
            self.train(step)
            self.checkpointer.step(step)

    def bytes(self) -> bytes:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for s in self.optimizer.state.values() for _k, v in sorted(s.items())]
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        return torch.cat(flat).numpy().tobytes()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """job(root=..., **options) makes a Job whose checkpointer is let go at the end of the test."""
    made: list[Job] = []

    def make(root: Path | None = None, **options: Any) -> Job:
        made.append(Job(root or tmp_path / "ckpt", **options))
        return made[-1]

    yield make
    for one in made:
        one.checkpointer.abandon()


def reference(steps: int, width: int = 16) -> bytes:
    """The state's bytes after so many undisturbed steps."""
    torch.manual_seed(0)
    plain = Job.__new__(Job)
    plain.width = width
    plain.model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.BatchNorm1d(width))
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        plain.train(step)
    return plain.bytes()


@pytest.fixture
def undisturbed() -> Any:
    return reference


@pytest.fixture(scope="session")
def forker() -> Iterator[Any]:
    """One process that has imported torch and forks ranks; ended with the session."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(HERE / "trainee.py")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


@pytest.fixture
def ranks(forker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start_ranks(forker, tmp_path_factory)
