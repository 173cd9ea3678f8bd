"""Signals to the launcher, and the launcher as the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
from launch_job import SCRIPTS, wait_until

pytestmark = pytest.mark.ranks
COUNT = str(SCRIPTS / "count.py")


def launch(job: Any, *more: str, **how: Any) -> Any:
    args = ["run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", *more]
    process = job.start(*args, COUNT, str(job.out), "60", **how)
    wait_until(lambda: job.last_step() >= 3, job.text)
    return process


@pytest.mark.campaign
def test_sighup_stays_ignored_if_it_was(job: Any) -> None:
    process = launch(job, before=["nohup"])
    process.send_signal(signal.SIGHUP)
    assert job.wait(process) == 0, job.text()


@pytest.mark.campaign
def test_a_signal_of_the_users_choice_is_a_notice(job: Any) -> None:
    process = launch(job, "--signals-to-handle", "SIGTERM,SIGUSR1")
    process.send_signal(signal.SIGUSR1)
    assert job.wait(process) == 82, job.text()
    assert "SIGUSR1: a last save" in job.text()


def test_sighup_of_a_closed_terminal_is_a_planned_end(job: Any) -> None:
    process = launch(job, before=["env", "--default-signal=HUP"])  # these tests may run under nohup
    process.send_signal(signal.SIGHUP)
    assert job.wait(process) == 129, job.text()
    assert len({e["step"] for e in job.events("a", "finish")}) == 1


ORPHANS = """
import os, subprocess, sys, time
subprocess.Popen(["sh", "-c", "sleep 0.2 & sleep 0.2 & exit 0"]).wait()  # orphans go to the first process
time.sleep(1.5)
zombies = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: zombies += open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError: pass
print("first is", open("/proc/1/cmdline").read().split(chr(0))[1:3], "zombies", zombies, flush=True)
open(sys.argv[1] + "/up." + os.environ["RANK"], "w").close()
time.sleep(600)
"""


@pytest.mark.root
def test_as_the_first_process_it_reaps_and_forwards(job: Any) -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("needs root and process namespaces")
    script = job.folder / "orphans.py"
    script.write_text(ORPHANS)
    process = job.start(
        *("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", str(script), str(job.out)),
        before=["unshare", "-pf", "--mount-proc"],
    )
    wait_until(lambda: len(list(job.out.glob("up.*"))) == 2, job.text)
    assert job.text().count("first is ['-m', 'ridethrough'] zombies 0") == 2
    (first,) = _children(process.pid)
    os.kill(first, signal.SIGTERM)
    assert job.wait(process) == 82, job.text()


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
