"""`rt.run` where no launcher of ours started the ranks: one plain process, torchrun, and what srun sets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from restart_job import HERE, left_behind

pytestmark = pytest.mark.ranks
SCRIPT = str(HERE / "beside.py")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Beside:
    """Starts ranks with given environments and waits for all; checks that agents and folders are gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, envs: list[dict[str, str]], options: dict[str, Any], argv: list[str] | None = None) -> Any:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("RIDETHROUGH", "SLURM", "RANK"))}
        keep |= {"RESTART_TEST": str(self._folder), "OMP_NUM_THREADS": "1"}
        ranks = []
        for env in envs:
            scratch = Path(env.get("TMPDIR", self._folder / "tmp"))
            scratch.mkdir(exist_ok=True)
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *(argv or []), SCRIPT, json.dumps(options)],
                    env={**keep, "TMPDIR": str(scratch), **env},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=self._folder,
                )
            )
        out = [rank.communicate(timeout=100)[0] for rank in ranks]
        for _ in range(200):
            if not (rest := left_behind(f"RESTART_TEST={self._folder}")):
                break
            subprocess.run(["sleep", "0.05"], check=True)
        assert rest == []
        assert list(self._folder.rglob("ridethrough-side-*")) == []
        lines = "\n".join(out).replace('}{"result"', '}\n{"result"').splitlines()  # several ranks write to one pipe
        told = [json.loads(line) for line in lines if line.startswith('{"result"')]
        return [rank.returncode for rank in ranks], told, "\n".join(out)


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    return Beside(tmp_path)


def srun(world_size: int, nodes: int = 1, **more: str) -> list[dict[str, str]]:
    per_node = world_size // nodes
    fixed = {"SLURM_NTASKS": str(world_size), "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    fixed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    return [
        {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % per_node), "SLURM_NODEID": str(r // per_node), **fixed}
        for r in range(world_size)
    ]


def test_one_plain_process_goes_on_after_an_exception(beside: Beside) -> None:
    codes, told, out = beside([{}], {"faults": {"1": ["exception", 0, 5], "2": ["exception", 0, 9]}})
    assert codes == [0], out
    assert told[0]["result"] == "trained" and told[0]["seen"] == [[0, 1]] * 3


def test_a_job_that_cannot_be_mended_ends_with_its_own_error(beside: Beside) -> None:
    faults = {str(g): ["exception", 0, 5] for g in range(1, 9)}
    codes, told, out = beside([{}], {"faults": faults, "max_restarts": 2})
    assert codes == [1] and told == []
    assert "ValueError: fault of generation 3" in out
    assert "2 restarts used up" in out


def test_torchrun(beside: Beside) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    faults = {"1": ["exception", 2, 5], "2": ["loop", 0, 12]}
    codes, told, out = beside([{}], {"faults": faults}, torchrun)
    assert codes == [0], out
    assert sorted(t["seen"] for t in told) == [[[r, 3]] * 3 for r in range(3)]


def test_survivors_go_on_with_contiguous_ranks_if_they_may(beside: Beside) -> None:
    codes, told, out = beside(srun(3), {"faults": {"1": ["kill", 1, 5]}, "min_world_size": 2})
    assert codes == [0, -9, 0], out
    assert sorted(t["seen"] for t in told) == [[[0, 3], [0, 2]], [[2, 3], [1, 2]]]


@pytest.mark.campaign
def test_the_job_ends_with_a_code_if_they_may_not(beside: Beside) -> None:
    codes, told, out = beside(srun(3), {"faults": {"1": ["kill", 1, 5]}})
    assert codes == [80, -9, 80], out
    assert told == []


@pytest.mark.campaign
def test_two_nodes_with_a_token(beside: Beside, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    envs = srun(2, 2, RIDETHROUGH_TOKEN_FILE=str(token), RIDETHROUGH_PORT=str(free_port()))
    for env in envs:  # the ranks of one node share its TMPDIR
        env["TMPDIR"] = str(tmp_path / f"node{env['SLURM_NODEID']}")
    codes, told, out = beside(envs, {"faults": {"1": ["exception", 1, 5]}})
    assert codes == [0, 0], out
    assert sorted(t["seen"][1] for t in told) == [[0, 2], [1, 2]]
    assert {t["result"] for t in told} == {"trained"}
