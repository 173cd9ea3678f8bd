"""A forked worker is, in all that a program can see, a `python script.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_job import SCRIPTS, wait_until

ENV = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN", "MY_VALUE": "a b", "PYTHONHASHSEED": "7"}

PROGRAMS = {
    "falls off the end": "print('out')",
    "exit code": "import sys; sys.exit(42)",
    "exit code past a byte": "import sys; sys.exit(257)",
    "exit with a text": "import sys; sys.exit('no such data set')",
    "exit with nothing": "import sys; sys.exit()",
    "exception": "def f():\n    raise ValueError('lr=-1')\nf()",
    "syntax error": "print('never')\nx = = 3",
    "chained exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('b') from e",
    "killed": "import os, signal; print('last words', end='', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "os._exit": "import os; os._exit(5)",
    "exit handler": "import atexit, sys; atexit.register(print, 'bye'); sys.exit(3)",
    "exit handler that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "thread": "import threading, time\nt = threading.Thread(target=lambda: (time.sleep(0.1), print('t')))\nt.start()",
    "daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "thread that fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()",
    "not flushed": "import sys; sys.stdout.write('no newline')",
    "own excepthook": "import sys\nsys.excepthook = lambda t, v, b: print('mine', v)\nraise ValueError('x')",
    "main module": "import __main__, sys\nprint(__main__.__file__ == __file__, sys.argv[1:], __name__, __spec__)",
    "unicode": "print('\\u00e9\\u4e16')",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_as_under_the_interpreter(name: str, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(PROGRAMS[name])
    ours = ["-c", "from ridethrough.launch.script import run_as_main; run_as_main(['p.py', 'a'])"]
    found = []
    for argv in (["p.py", "a"], ours):
        done = subprocess.run(
            [sys.executable, "-u", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        found.append((done.returncode, done.stdout, re.sub("0x[0-9a-f]+", "0x", done.stderr)))
    assert found[0] == found[1]


def _in_the_foreground() -> None:
    """A shell ignores these for what it starts in the background; a worker never does."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["script", pytest.param("module", marks=pytest.mark.campaign)])
def test_what_a_program_can_see(job: Any, form: str) -> None:
    (job.folder / "facts.py").write_text((SCRIPTS / "facts.py").read_text())
    command = ["-m", "facts"] if form == "module" else ["facts.py"]
    plain = subprocess.run(
        [sys.executable, "-u", *command, "plain.json", "a", "--b"],
        cwd=job.folder,
        env={**os.environ, **ENV, "MY_EXIT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        preexec_fn=_in_the_foreground,
    )
    assert plain.returncode == 0, plain.stderr.decode()
    code = job.run(
        *("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", *command, "rankRANK.json", "a", "--b"),
        env={**ENV, "MY_EXIT": "0"},
    )
    assert code == 0, job.text()
    assert "instead of forked" not in job.text()
    facts = {name: json.loads((job.folder / f"{name}.json").read_text()) for name in ("plain", "rank0", "rank1")}
    drawn = [found.pop("drawn") for found in facts.values()]
    assert len({str(d) for d in drawn}) == 3, "every process draws its own random numbers"
    assert facts["rank0"] == facts["rank1"] == facts["plain"]
    ends = [(job.folder / f"{name}.json.exit").read_text() for name in ("plain", "rank0", "rank1")]
    assert ends[0] == ends[1] == ends[2] and ends[0].count("\n") == 3
    logs = sorted((job.folder / "runs" / "a" / "logs").glob("a0000-rank*.log"))
    assert [log.read_text() for log in logs] == ["never flushed by the program\n"] * 2


@pytest.mark.ranks
def test_a_preload_that_cannot_be_forked_is_named_and_the_ranks_are_executed(job: Any) -> None:
    (job.folder / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    script = job.folder / "hello.py"
    script.write_text("import os; print('hello from', os.environ['RANK'])\n")
    args = ["run", "--nproc-per-node", "2", "--preload", "threaded", "--runs", "runs", "--run-id", "a", str(script)]
    assert job.run(*args, env={"PYTHONPATH": f"{job.folder}:{os.environ.get('PYTHONPATH', '')}"}) == 0, job.text()
    assert "started anew instead of forked: 2 threads after the import of threaded" in job.text()
    assert "hello from 0" in job.text() and "hello from 1" in job.text()


@pytest.mark.ranks
def test_a_program_of_any_kind(job: Any) -> None:
    script = job.folder / "program.sh"
    script.write_text("#!/bin/sh\necho rank $RANK of $WORLD_SIZE, $1\nexit $RANK\n")
    script.chmod(0o755)
    args = ["run", "--no-python", "--nproc-per-node", "2", "--max-restarts", "0", "--runs", "runs", "--run-id", "a"]
    assert job.run(*args, str(script), "${local_rank}x") == 1, job.text()
    assert "rank 1 of 2, 1x" in job.text() and "rank 0 of 2, 0x" in job.text()


@pytest.mark.ranks
def test_a_killed_zygote_is_replaced_at_once(job: Any) -> None:
    process = start_counting(job, 150)
    zygote = min(_forked_from_here(process.pid), key=_start_time)
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: "the zygote died; starting another" in job.text(), job.text)
    for generation in (1, 2):
        reached = job.last_step()
        wait_until(lambda reached=reached: job.last_step() > reached + 3, job.text)
        victim = next(e["pid"] for e in job.entered() if e["generation"] == generation and e["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda g=generation: any(e["generation"] == g + 1 for e in job.entered()), job.text)
    assert job.wait(process) == 0, job.text()
    assert [i["class"] for i in job.events("a", "incident")] == ["sigkill"] * 2
    assert "executed, not forked" not in job.text()


@pytest.mark.ranks
@pytest.mark.campaign
def test_a_stopped_zygote_harms_nobody(job: Any) -> None:
    """It does not answer; it is ended before another one starts, and the job's processes stay."""
    process = start_counting(job, 150, "--spares", "0")
    zygote = min(_forked_from_here(process.pid), key=_start_time)
    os.kill(zygote, signal.SIGSTOP)
    before = {e["rank"]: e["pid"] for e in job.entered()}
    os.kill(before[1], signal.SIGKILL)
    assert job.wait(process) == 0, job.text()
    after = {e["rank"]: e["pid"] for e in job.entered()}
    assert after[0] == before[0] and len(job.events("a", "incident")) == 1
    assert "the zygote did not fork within 5 s; starting another" in job.text()


@pytest.mark.ranks
def test_a_spare_takes_the_dead_ranks_place_and_another_follows(job: Any) -> None:
    process = start_counting(job, 100)
    (spare,) = wait_until(lambda: _idle_spares(job), job.text)
    victim = next(e["pid"] for e in job.entered() if e["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: any(e["generation"] == 2 for e in job.entered()), job.text)
    assert {e["rank"]: e["pid"] for e in job.entered()}[1] == spare
    (second,) = wait_until(lambda: _idle_spares(job), job.text)
    os.kill(second, signal.SIGKILL)  # nothing ends with it
    (third,) = wait_until(lambda: _idle_spares(job) - {second}, job.text)
    assert third != spare
    assert job.wait(process) == 0, job.text()
    assert len(job.events("a", "incident")) == 1


@pytest.mark.ranks
@pytest.mark.campaign
def test_an_executed_spare_where_nothing_may_be_forked(job: Any) -> None:
    (job.folder / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    path = f"{job.folder}:{os.environ.get('PYTHONPATH', '')}"
    process = start_counting(job, 150, "--preload", "threaded", env={"PYTHONPATH": path})
    (spare,) = wait_until(lambda: _idle_spares(job), job.text)
    os.kill(next(e["pid"] for e in job.entered() if e["rank"] == 1), signal.SIGKILL)
    assert job.wait(process) == 0, job.text()
    assert {e["rank"]: e["pid"] for e in job.entered()}[1] == spare


def start_counting(job: Any, steps: int, *options: str, **how: Any) -> subprocess.Popen[bytes]:
    """A job of two ranks, in the middle of its steps."""
    process = job.start(
        *("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", *options),
        *(str(SCRIPTS / "count.py"), str(job.out), str(steps)),
        **how,
    )
    wait_until(lambda: job.last_step() >= 3, job.text)
    return process


def _idle_spares(job: Any) -> set[int]:
    """Spares by the ledger, less those that are a rank's process now, or gone."""
    spares = {e["pid"] for e in job.events("a", "worker_spawn") if e["rank"] is None}
    ranks = {e["pid"] for e in job.events("a", "worker_spawn") if e["rank"] is not None}
    return spares - ranks - {e["pid"] for e in job.events("a", "worker_exit")}


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def _forked_from_here(agent: int) -> list[int]:
    """The agent's zygote, and what it has forked: their command line is the same."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ridethrough.launch.zygote" in words and str(agent).encode() in words:
            found.append(int(name))
    return found
