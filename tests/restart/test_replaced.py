"""Faults that only a new process mends: the dead or stuck rank is replaced, its peers keep their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks


@pytest.mark.campaign
def test_deaths_and_stuck_processes_in_a_row_replace_only_the_guilty(jobs: Any) -> None:
    faults = ["sigkill:0:12", "sigstop:-1:18", "hang_native:1:24", "hang_native_gil:2:30", "sigkill:-1:36"]
    job = jobs(options={"kind": "ddp", "total": 40}, faults=faults)
    assert job.code == 0, job.out
    want = [("sigkill", 0), ("hang", 3), ("hang", 1), ("hang", 2), ("sigkill", 3)]
    assert job.told("class", "rank") == want
    assert {i["rung"] for i in job.incidents} == {"replace_process"}
    assert job.spawns() == {0: 2, 1: 2, 2: 2, 3: 3}
    stacks = list(job.run.glob("incidents/*/rank1.stacks.txt"))
    assert any("native_gil_free" in path.read_text() for path in stacks)


_STOPS = """
import ctypes, os, signal, time
import torch, torch.distributed as dist
import ridethrough as rt

def train(run):
    start = {1: 0, 2: 4}.get(run.generation, 7)
    pair = dist.new_group([0, 1])
    for step in run.steps(start, 12):
        time.sleep(0.1)
        stops = run.rank == 1 and (run.generation, step) in ((1, 5), (2, 8))
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if (run.generation, step, run.rank) == (3, 10, 0):
            ctypes.string_at(0)  # SIGSEGV
        dist.all_reduce(torch.ones(1), group=pair if step == 8 else None)  # step 8: the first one on that group

rt.run(train)
"""


def test_b30_a_stopped_rank_is_named_killed_and_replaced(jobs: Any, tmp_path: Path) -> None:
    """At step 5, and in the first collective of a sub-group; `jobs` sees that the stopped processes are gone. And one
    whose native code fails."""
    script = tmp_path / "script.py"
    script.write_text(_STOPS)
    job = jobs(script, ranks=2, policy={"first_step_limit_s": 3.0, "hang_floor_s": 3.0})
    assert job.code == 0, job.out
    assert job.told("class", "rank", "step", "rung") == [
        ("hang", 1, 5, "replace_process"),
        ("hang", 1, 8, "replace_process"),
        ("sigsegv", 0, 10, "replace_process"),
    ]
    assert job.spawns() == {0: 2, 1: 3}


@pytest.mark.campaign
def test_two_ranks_at_once_and_faults_during_a_recovery(jobs: Any) -> None:
    faults = ["exception:0:12", "exception:2:12", "sigkill:1:18", "exception:3:18"]
    faults += ["exception:1:24", "sigkill:2:24:recovery", "exception:0:30", "exception:3:30:init"]
    faults += ["hang_loop:3:36", "hang_lock:0:36:load"]
    job = jobs(options={"kind": "fsdp", "total": 42}, faults=faults, policy={"load_limit_s": 2.0})
    assert job.code == 0, job.out
    assert len(job.of("fault_injected")) == 10
    told = job.told("class", "rank")
    # Of two at once the one may strike in the next generation, before a step is done: still the same incident.
    assert ("sigkill", 1) in told[1:-6]
    assert set(told[:-6]) <= {("exception", 0), ("exception", 2), ("exception", 3), ("sigkill", 1)}
    assert told[-6:-4] == [("exception", 1), ("sigkill", 2)]
    assert told[-4:-2] == [("exception", 0), ("exception", 3)]
    assert told[-2:] == [("hang", 3), ("hang", 0)]
    ids = [i["id"] for i in job.incidents]
    assert (ids[-6], ids[-4], ids[-2]) == (ids[-5], ids[-3], ids[-1])
    assert [i["attempts"] for i in job.incidents][-6:] == [1, 2, 1, 2, 1, 2]


def test_a_fault_in_every_phase(jobs: Any) -> None:
    phases = ["data", "forward", "backward", "optimizer", "save", "eval"]
    faults = [f"exception:{i % 4}:{8 + 5 * i}:{phase}" for i, phase in enumerate(phases)]
    job = jobs(options={"kind": "fsdp", "total": 42, "save_every": 1, "eval_every": 1}, faults=faults)
    assert job.code == 0, job.out
    assert job.told("class", "phase", "rank") == [("exception", phase, i % 4) for i, phase in enumerate(phases)]


def test_torch_modes_left_switched_replace_the_process(jobs: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LEAVES_MODES)
    job = jobs(script, ranks=2)
    assert job.code == 0, job.out
    assert job.told("class", "rank") == [("exception", 1), ("exception", 1)]
    assert "autocast cpu is True (was False)" in job.out
    assert "grad is False (was True)" in job.out
    assert job.spawns() == {0: 1, 1: 3}


_LEAVES_MODES = """
import torch, torch.distributed as dist
import ridethrough as rt

def train(run):
    done = torch.zeros(1)
    dist.all_reduce(done)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    for step in run.steps(0, 6):
        dist.all_reduce(torch.ones(1))
        if step == 4 and run.rank == 1 and run.generation == 1:
            torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
            raise ValueError("between enter and exit")
        if step == 5 and run.rank == 1 and run.generation == 2:
            torch.set_grad_enabled(False)
            raise ValueError("no grad")

rt.run(train)
"""
