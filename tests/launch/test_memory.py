"""Out of memory: told from other deaths, and acted on before the kernel does. Needs root and a memory cgroup."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_job import wait_until

ROOT = next((p for p in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None)
pytestmark = [pytest.mark.ranks, pytest.mark.root]

HUNGRY = """
import os, sys, time
held = []
if os.environ["RANK"] == "1":
    print("score", open("/proc/self/oom_score_adj").read(), flush=True)
    for _ in range({steps}):
        held.append(bytearray(os.urandom(1 << 16)) * 16 * {mb})
        time.sleep({pause})
time.sleep(120)
"""


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[int], list[str]]]:
    """Words before a command that put it under a memory limit of so many MB."""
    if os.getuid() != 0 or ROOT is None:
        pytest.skip("needs root and cgroups")
    group = ROOT / f"ridethrough-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
    if not limit.exists():
        group.rmdir()
        pytest.skip("the memory controller is not here")

    def before(megabytes: int) -> list[str]:
        limit.write_text(str(megabytes << 20))
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text("0" if name == "memory.swap.max" else str(megabytes << 20))
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]

    yield before
    wait_until(lambda: not (group / "cgroup.procs").read_text().split(), "processes are left in the group", 20)
    group.rmdir()


def launch(job: Any, before: list[str], text: str) -> int:
    script = job.folder / "hungry.py"
    script.write_text(text)
    args = ["run", "--nproc-per-node", "2", "--max-restarts", "0", "--runs", "runs", "--run-id", "a", str(script)]
    return int(job.wait(job.start(*args, before=before)))


def test_a04_the_kernels_kill_is_called_out_of_memory(job: Any, limited: Any) -> None:
    """A gigabyte at once: the kernel is faster than anybody."""
    assert launch(job, limited(1400), HUNGRY.format(steps=1, mb=3000, pause=0)) == 137, job.text()
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rank"]) == ("oom", 1)
    assert "score 300" in job.text()


def test_a04_any_other_kill_is_not(job: Any) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    assert launch(job, [], text) == 137, job.text()
    (incident,) = job.events("a", "incident")
    assert incident["class"] == "sigkill" and "SIGKILL, unknown sender" in incident["root_cause"]


def test_the_largest_rank_goes_before_the_kernel_ends_all(job: Any, limited: Any) -> None:
    assert launch(job, limited(1400), HUNGRY.format(steps=600, mb=8, pause=0.05)) == 137, job.text()
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rank"]) == ("oom", 1)
    assert "by this rank, the most; ended before the kernel ends all" in incident["root_cause"]


def test_a_death_with_much_memory_is_told_before_the_process_is_gone(job: Any) -> None:
    """Rule 14: the kernel takes a while to free two gigabytes; the others hear of it before."""
    script = job.folder / "large.py"
    script.write_text(
        "import os, signal, time, ridethrough as rt\n"
        "def train(run):\n"
        "    held = bytearray(2 << 30) if run.rank and run.generation == 1 else b''\n"
        "    for i in range(0, len(held), 4096): held[i] = 1\n"
        "    for step in run.steps(0, 30):\n"
        "        time.sleep(0.05)\n"
        "        if held and step == 10: os.kill(os.getpid(), signal.SIGKILL)\n"
        "rt.run(train)\n"
    )
    args = ["run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", str(script)]
    assert job.run(*args) == 0, job.text()
    first = next(e for e in job.events("a", "fault") if e["class"] == "sigkill")
    gone = next(e for e in job.events("a", "worker_exit") if e["signal"] == signal.SIGKILL)
    assert first["t_ns"] < gone["t_ns"]
    assert len(job.events("a", "incident")) == 1
