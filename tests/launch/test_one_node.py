"""Real jobs on one machine: what is replaced, what stays, what is left."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from launch_job import SCRIPTS, expected, wait_until

pytestmark = pytest.mark.ranks
COUNT = str(SCRIPTS / "count.py")
STEPS = 40


def launch(job: Any, *options: str, steps: int = STEPS, **more: Any) -> Any:
    args = ["run", "--nproc-per-node", "3", "--runs", "runs", "--run-id", "a", *options]
    return job.start(*args, COUNT, str(job.out), str(steps), **more)


def pids(job: Any, generation: int) -> dict[int, int]:
    return {e["rank"]: e["pid"] for e in job.entered() if e["generation"] == generation}


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_killed_rank_alone_is_replaced(job: Any, victim: int) -> None:
    process = launch(job)
    wait_until(lambda: job.last_step() >= 5, "no steps")
    before = pids(job, 1)
    os.kill(before[victim], signal.SIGKILL)
    assert job.wait(process) == 0, job.text()
    after = pids(job, 2)
    assert {r for r in before if before[r] != after[r]} == {victim}
    assert job.results() == [expected(STEPS, 3)] * 3
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rank"], incident["rung"]) == ("sigkill", victim, "replace_process")
    said = [line for line in job.text("agent").splitlines() if line.startswith("ridethrough: a worker")]
    assert not said, "a death is told by its incident alone"


def test_an_exception_replaces_nobody(job: Any) -> None:
    process = launch(job, "--fault-at", "exception:-1:10:step", "--fault-steps", "40")
    assert job.wait(process) == 0, job.text()
    assert pids(job, 1) == pids(job, 2)
    assert job.results() == [expected(STEPS, 3)] * 3
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rung"], incident["step"]) == ("exception", "in_process", 10)


STUCK = """
import json, os, sys, time
import ridethrough as rt
def train(run):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"generation": run.generation, "rank": run.rank, "pid": os.getpid()}) + "\\n")
    for step in run.steps(0, 3):
        if run.generation == 1 and step == 2 and run.rank == 2:
            open("stuck", "w").close()
            sum(range(10**11))  # holds the interpreter: it can be neither told nor interrupted
        if run.generation == 1 and step == 2 and run.rank == 1:
            while not os.path.exists("stuck"):
                time.sleep(0.01)
            time.sleep(0.2)
            raise ValueError("the root")
rt.run(train)
"""


def test_a_stuck_rank_is_replaced_and_takes_nobody_with_it(job: Any) -> None:
    script = job.folder / "stuck.py"
    script.write_text(STUCK)
    args = ["run", "--nproc-per-node", "3", "--runs", "runs", "--run-id", "a", str(script)]
    assert job.run(*args, str(job.out / "entered.jsonl")) == 0, job.text()
    before, after = pids(job, 1), pids(job, 2)
    assert {rank for rank in before if before[rank] != after[rank]} == {2}
    (incident,) = job.events("a", "incident")
    assert (incident["class"], incident["rank"], incident["rung"]) == ("exception", 1, "replace_process")


@pytest.mark.campaign
def test_killed_again_and_again(job: Any) -> None:
    process = launch(job, steps=120)
    for kill in range(5):
        reached = job.last_step()
        wait_until(lambda reached=reached: job.last_step() > reached + 3, f"no progress after kill {kill}")
        newest = max(e["generation"] for e in job.entered())
        os.kill(pids(job, newest)[kill % 3], signal.SIGKILL)
    assert job.wait(process) == 0, job.text()
    assert job.results() == [expected(120, 3)] * 3
    assert len(job.events("a", "incident")) == 5


def test_the_launcher_killed_leaves_nobody(job: Any) -> None:
    process = launch(job, steps=2000)
    wait_until(lambda: job.last_step() >= 3, "no steps")
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.check_nothing_left()


def test_the_launcher_killed_while_workers_start(job: Any) -> None:
    process = launch(job, steps=2000)
    wait_until(lambda: len(job.alive()) >= 2, "nothing starts")
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.check_nothing_left()


def test_the_launcher_killed_while_a_preload_is_imported(job: Any) -> None:
    (job.folder / "slow.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(3000)\n")
    process = launch(job, "--preload", "slow", env={"PYTHONPATH": f"{job.folder}:{os.environ.get('PYTHONPATH', '')}"})
    wait_until((job.folder / "begun").exists, "the import does not begin")
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.check_nothing_left()


@pytest.mark.parametrize("sig, code", [(signal.SIGTERM, 82), (signal.SIGINT, 130)])
def test_a_planned_stop_ends_all_ranks_at_one_step(job: Any, sig: signal.Signals, code: int) -> None:
    process = launch(job, steps=2000)
    wait_until(lambda: job.last_step() >= 5, "no steps")
    process.send_signal(sig)
    assert job.wait(process) == code, job.text()
    ends = job.events("a", "finish")
    assert len(ends) == 3 and len({e["step"] for e in ends}) == 1
    assert all(e["stopped"] for e in ends)


def test_two_signals_end_it_at_once(job: Any) -> None:
    process = launch(job, steps=2000)
    wait_until(lambda: job.last_step() >= 5, "no steps")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert job.wait(process) == 130, job.text()


def test_exit_codes_without_recovery(job: Any) -> None:
    script = job.folder / "exit.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1': sys.exit(42)\nimport time; time.sleep(60)\n")
    args = ["run", "--nproc-per-node", "2", "--max-restarts", "0", "--runs", "runs", "--run-id", "b"]
    assert job.run(*args, str(script)) == 42, job.text()
    script.write_text(
        "import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 11)\nimport time; time.sleep(60)\n"
    )
    assert job.run(*args[:-1], "c", str(script)) == 139, job.text()


def test_of_two_launches_of_one_run_the_older_is_not_to_be_started_again(job: Any) -> None:
    """It finds the other's claim when it is to plan; the run's folder is the other's by then."""
    process = launch(job, steps=5000)
    wait_until(lambda: job.last_step() >= 5, "no steps")
    (job.folder / "runs" / "a" / "epochs" / "1").write_text("process 7 on another\n")
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    assert job.wait(process) == 83, job.text()
    assert "epoch 1 has taken over from epoch 0: process 7 on another" in job.text().splitlines()[-1]
    assert json.loads((job.folder / "runs" / "a" / "run.json").read_text())["result"] is None
    assert not job.events("a", "job_end")


def test_the_last_words_are_the_root_cause(job: Any) -> None:
    script = job.folder / "bad.py"
    script.write_text(
        "import ridethrough as rt, torch, torch.distributed as dist\n"
        "def train(run):\n"
        "    for step in run.steps(0, 10):\n"
        "        if step == 3 and run.rank == 1: raise ValueError('lr=-1')\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "rt.run(train)\n"
    )
    code = job.run("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "d", str(script))
    assert code == 81
    last = job.text("agent").split("root cause:")[1]
    assert "rank 1" in last and "ValueError: lr=-1" in last and "bad.py:4" in last


def test_what_the_ranks_started_goes_with_them(job: Any) -> None:
    script = job.folder / "child.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "subprocess.Popen(['sleep', '97531'], start_new_session=True)\n"
        "sys.exit(3 if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    code = job.run("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "e", str(script))
    assert code == 0, job.text()


def test_a_script_without_rt_is_started_anew_as_a_whole(job: Any) -> None:
    script = job.folder / "plain.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
        "x = torch.ones(1); dist.all_reduce(x); print('sum', x.item(), flush=True)\n"
        "if dist.get_rank() == 1 and not again: os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(x); dist.destroy_process_group()\n"
    )
    code = job.run("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "f", str(script))
    assert code == 0, job.text()
    assert job.text().count("sum 2.0") == 4


LATE = """
import os, signal, sys
import ridethrough as rt
rt.run(lambda run: [None for _ in run.steps(0, 3)])
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("the export failed")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.campaign)])
def test_what_fails_behind_the_training_function_is_no_success(job: Any, how: str) -> None:
    script = job.folder / "late.py"
    script.write_text(LATE)
    code = job.run("run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", str(script), how)
    assert code == 81, job.text()
    assert "rank 1 failed after the training function" in job.text()
    (end,) = job.events("a", "job_end")
    assert end["code"] == 81
