"""Failure reports from the public, one test each: the launcher's share. Full counts are for the campaign."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from launch_job import SCRIPTS, free_port, wait_until

pytestmark = pytest.mark.ranks
COUNT = str(SCRIPTS / "count.py")


def script(job: Any, text: str, name: str = "train.py") -> str:
    path = job.folder / name
    path.write_text(text)
    return str(path)


def options(run_id: str, ranks: int = 2, *more: str) -> list[str]:
    return ["run", "--nproc-per-node", str(ranks), "--runs", "runs", "--run-id", run_id, *more]


PLAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
for step in range(1, 11):
    if step == 3 and dist.get_rank() == 1:
        print("said without a newline", end="")
        {what}
    dist.all_reduce(x)
"""


def test_a01_the_culprit_is_named_and_every_attempts_log_is_kept(job: Any) -> None:
    train = script(job, PLAIN.format(what="raise ValueError('lr=-1')"))
    assert job.run(*options("a", 2, "--max-restarts", "1"), train) != 0
    last = job.text("agent").split("root cause:")[1]
    assert "rank 1" in last.splitlines()[0] and "ValueError: lr=-1" in last and "train.py:8" in last
    secondary = [line for line in job.text("agent").splitlines() if line.startswith("  secondary:")]
    assert all("rank 0" in line for line in secondary)
    incidents = job.events("a", "incident")
    assert {i["rank"] for i in incidents} == {1} and all("ValueError: lr=-1" in i["root_cause"] for i in incidents)
    assert {s["rank"] for i in incidents for s in i["secondary"]} <= {0}
    logs = {p.name: p.read_text() for p in (job.folder / "runs" / "a" / "logs").glob("*.log")}
    for attempt in ("a0000", "a0001"):
        assert "ValueError: lr=-1" in logs[f"{attempt}-rank1.log"]
        assert "ValueError" not in logs[f"{attempt}-rank0.log"]


def test_a01_what_a_killed_rank_said_last_is_kept(job: Any) -> None:
    train = script(job, PLAIN.format(what="os.kill(os.getpid(), 9)"))
    assert job.run(*options("a", 2, "--max-restarts", "0"), train) == 137
    assert "[rank1] said without a newline" in job.text("agent")
    assert "rank 1" in job.text("agent").split("root cause:")[1].splitlines()[0]


LOADER = """
import os, sys, time, torch, json
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        open(sys.argv[1] + f"/loader-{os.getpid()}", "w").close()
        time.sleep(60)
out = sys.argv[1]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(out + "/rank", "w").write(str(os.getpid()))
    next(iter(DataLoader(Slow(), num_workers=2)))
alive = [p for p in os.listdir(out) if p.startswith("loader-") and os.path.exists("/proc/" + p.split("-")[1])]
open(out + "/second", "w").write(json.dumps(alive))
"""


def test_a02_loaders_of_a_killed_rank_are_gone_before_the_next_attempt(job: Any) -> None:
    process = job.start(*options("a", 1), script(job, LOADER), str(job.out))
    wait_until(lambda: len(list(job.out.glob("loader-*"))) == 2, job.text)
    os.kill(int((job.out / "rank").read_text()), signal.SIGKILL)
    assert job.wait(process) == 0, job.text()
    assert json.loads((job.out / "second").read_text()) == []


def test_a05_five_ends_five_codes(job: Any) -> None:
    what = {
        "exit": "if os.environ['RANK'] == '1': sys.exit(42)",
        "segv": "if os.environ['RANK'] == '1': os.kill(os.getpid(), 11)",
        "good": "sys.exit(0)",
    }
    codes = {}
    for name, line in what.items():
        train = script(job, f"import os, sys, time\n{line}\ntime.sleep(30)\n", f"{name}.py")
        codes[name] = job.run(*options(name, 2, "--max-restarts", "0"), train, name=name)
    used_up = script(job, "import os, sys, time\ntime.sleep(0.5)\nsys.exit(int(os.environ['RANK']))\n", "up.py")
    more = ["--max-restarts", "1", "--policy", str(job.folder / "policy.json")]
    (job.folder / "policy.json").write_text('{"max_same_before_any_step": 9, "max_same_fault": 9}')
    codes["used up"] = job.run(*options("up", 2, *more), used_up, name="up")
    process = job.start(*options("stop"), COUNT, str(job.out), "5000", name="stop")
    wait_until(lambda: job.last_step() >= 3, job.text)
    process.send_signal(signal.SIGTERM)
    codes["preempted"] = job.wait(process)
    assert codes == {"exit": 42, "segv": 139, "good": 0, "used up": 80, "preempted": 82}, job.text()


HOLD = """
import socket, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen(); print("held", flush=True); time.sleep(float(sys.argv[2]))
"""


def hold(port: int, seconds: float) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(port), str(seconds)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    return holder


def test_a06_a_port_that_is_held_for_a_while_is_waited_for(job: Any) -> None:
    port = free_port()
    holder = hold(port, 8)
    train = script(job, "import os\nprint('address', os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\n")
    try:
        assert job.run(*options("a", 2, "--master-port", str(port)), train) == 0, job.text()
    finally:
        holder.kill()
        holder.wait()
    assert job.text().count(f"address 127.0.0.1 {port}") == 2


@pytest.mark.parametrize("which", ["store", pytest.param("coordinator", marks=pytest.mark.campaign)])
def test_a06_a_port_that_is_held_for_ever_is_named_with_its_holder(job: Any, which: str) -> None:
    port = free_port()
    holder = hold(port, 300)
    train = script(job, "print('never')\n")
    where = ["--master-port", str(port)]
    if which == "coordinator":
        where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--token-file", str(job.token)]
    began = time.monotonic()
    try:
        assert job.run(*options("a", 2, *where), train) == 2, job.text()
    finally:
        holder.kill()
        holder.wait()
    assert time.monotonic() - began < 40  # 15 s on a machine that does nothing else
    (line,) = [line for line in job.text("agent").splitlines() if f"port {port}" in line]
    assert f"process {holder.pid} (" in line and "Traceback" not in job.text()


def cycles(job: Any, count: int) -> None:
    port = free_port()
    for cycle in range(count):
        name = f"c{cycle}"
        reached = job.last_step()
        process = job.start(*options(name, 2, "--master-port", str(port)), COUNT, str(job.out), "5000", name=name)
        wait_until(lambda reached=reached: job.last_step() > reached, job.text)
        assert process.poll() is None
        for pid in job.alive():
            os.kill(pid, signal.SIGKILL)
        process.wait()
    done = script(job, "print('done')\n")  # a later launch also takes away the folders that the killed ones left
    assert job.run(*options("last", 2, "--master-port", str(port)), done, name="last") == 0, job.text()


def test_a06_killed_and_started_again_at_once_on_the_same_port(job: Any) -> None:
    cycles(job, 2)


@pytest.mark.campaign
def test_a06_killed_and_started_again_at_once_ten_times(job: Any) -> None:
    cycles(job, 10)


SAVER = """
import os, signal, sys, time
out = sys.argv[1]
def save(sig, frame):
    for k in range(60):
        time.sleep(0.1)
    open(out + "/new." + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(out + "/old." + os.environ["RANK"], "w").close()
open(out + "/up." + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("grace_s", [3, 10])
def test_b14_the_grace_is_what_was_asked_for(job: Any, grace_s: int) -> None:
    """The save takes six seconds; a script without rt.run gets the signal itself."""
    process = job.start(*options("a", 2, "--stop-grace", str(grace_s)), script(job, SAVER), str(job.out))
    wait_until(lambda: len(list(job.out.glob("up.*"))) == 2, job.text)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert job.wait(process) == 82, job.text()
    took_s = time.monotonic() - began
    assert len(list(job.out.glob("old.*"))) == 2
    if grace_s == 3:
        assert took_s >= 3 and not list(job.out.glob("new.*"))
    else:
        assert took_s >= 6 and len(list(job.out.glob("new.*"))) == 2


EMERGENCY = """
import sys, time, torch, ridethrough as rt
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 100000
    def __getitem__(self, i):
        time.sleep(0.02)
        return i
def train(run):
    loader = iter(DataLoader(Slow(), batch_size=2, num_workers=int(sys.argv[2])))
    state = rt.State(model=torch.nn.Linear(2, 2))
    ckpt = rt.Checkpointer(sys.argv[1] + "/ckpt", state)
    for step in run.steps(ckpt.load(), 100000):
        with run.phase("data"):
            next(loader)
        if step == 5:
            open(sys.argv[1] + f"/step5.{run.rank}", "w").close()
rt.run(train)
"""


@pytest.mark.parametrize(
    "workers, whole_group",
    [
        (2, True),
        pytest.param(0, True, marks=pytest.mark.campaign),
        pytest.param(2, False, marks=pytest.mark.campaign),
    ],
)
def test_b15_a_signal_to_the_whole_group_still_saves(job: Any, workers: int, whole_group: bool) -> None:
    process = job.start(*options("a"), script(job, EMERGENCY), str(job.out), str(workers))
    wait_until(lambda: len(list(job.out.glob("step5.*"))) == 2, job.text)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGTERM)
    assert job.wait(process) == 82, job.text()
    (agreed,) = {e["step"] for e in job.events("a", "finish")}
    assert agreed >= 5 and list((job.out / "ckpt").glob(f"step-{agreed}.*/COMMIT")), job.text()
    assert "SIGTERM" in job.text("agent")


LOOPING = """
import sys, time, torch, ridethrough as rt
def train(run):
    ckpt = rt.Checkpointer(sys.argv[1] + "/ckpt", rt.State(model=torch.nn.Linear(2, 2)), every=1)
    for step in run.steps(ckpt.load(), 100000):
        time.sleep(0.05)
rt.run(train)
"""


@pytest.mark.parametrize("importing", [True, False])
def test_b17_a_launcher_killed_leaves_no_worker_and_nothing_is_saved_later(job: Any, importing: bool) -> None:
    process = job.start(*options("a"), script(job, LOOPING), str(job.out))
    if importing:
        time.sleep(0.7)
    else:
        wait_until(lambda: any((job.out / "ckpt").glob("step-*/COMMIT")), job.text)
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.check_nothing_left()
    assert importing == (not job.events("a", "step"))
    held = sorted((job.out / "ckpt").rglob("*"))
    time.sleep(0.5)
    assert sorted((job.out / "ckpt").rglob("*")) == held


def test_b18_what_ranks_started_is_gone_after_each_attempt(job: Any) -> None:
    train = script(
        job,
        "import os, subprocess, sys\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
        "seconds = '97531.' + str(int(os.environ['JOB_MARK'], 16) % 10**9)\n"  # other jobs' tests run beside it
        "def sleepers():\n"
        "    found = []\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        try: words = open(f'/proc/{pid}/cmdline').read().split('\\0')\n"
        "        except OSError: continue\n"
        "        if words[:2] == ['sleep', seconds] and pid not in found: found.append(pid)\n"
        "    return found\n"
        "if again: open(sys.argv[1] + '/left.' + os.environ['RANK'], 'w').write(' '.join(sleepers()))\n"
        "import time; time.sleep(1)\n"
        "subprocess.Popen(['sleep', seconds], start_new_session=True)\n"
        "subprocess.Popen(['sh', '-c', f'sleep {seconds} & exit 0'])\n"
        "time.sleep(0.3)\n"
        "if os.environ['RANK'] == '1' and not again: os._exit(3)\n",
    )
    assert job.run(*options("a"), train, str(job.out)) == 0, job.text()
    assert [p.read_text() for p in job.out.glob("left.*")] == ["", ""]


B23 = """
import json, os, sys, torch, torch.distributed as dist
import ridethrough as rt
def train(run):
    for step in run.steps(run.generation, 21):
        if run.generation == 1 and step < 4:
            continue  # a script that fails before it has done anything is not started again
        if sys.argv[2] == "odd" and run.generation % 2 and run.rank == 1:
            raise ValueError(f"between init and all_reduce, {run.generation}")
        total = torch.ones(1)
        dist.all_reduce(total)
        with open(f"{sys.argv[1]}/sums.{run.rank}", "a") as file:
            file.write(json.dumps([run.generation, total.item(), os.getpid()]) + "\\n")
        if run.generation < 20:
            raise ValueError(f"after it, {run.generation}")
rt.run(train)
"""


@pytest.mark.parametrize("cut", ["odd", pytest.param("never", marks=pytest.mark.campaign)])
def test_b23_a_group_made_twenty_times_never_meets_an_earlier_one(job: Any, cut: str) -> None:
    """`odd`: in each odd generation a rank raises where its peer is in the collective."""
    limits = {"max_no_progress": 99, "max_same_fault": 99, "max_same_before_any_step": 99, "max_rank_faults": 99}
    policy = job.folder / "policy.json"
    policy.write_text(json.dumps({**limits, "replace_process_after": 99, "rebuild_limit_s": 60}))
    assert job.run(*options("a", 2, "--policy", str(policy)), script(job, B23), str(job.out), cut) == 0, job.text()
    for rank in range(2):
        sums = [json.loads(line) for line in (job.out / f"sums.{rank}").read_text().splitlines()]
        first, step = (2, 2) if cut == "odd" else (1, 1)
        assert [(generation, total) for generation, total, _ in sums] == [(g, 2.0) for g in range(first, 21, step)]
        assert len({pid for *_, pid in sums}) == 1
    assert [plan["generation"] for plan in job.events("a", "plan")] == list(range(1, 21))


def attempts(job: Any, run_id: str) -> int:
    return len(job.events(run_id, "incident"))


B19 = """
import sys, torch, ridethrough as rt
def train(run):
    {before}
    state = rt.State(model=torch.nn.Linear(2, 2))
    ckpt = rt.Checkpointer(sys.argv[1] + "/ckpt", state, every=5)
    for step in run.steps(ckpt.load(), 100):
        {within}
rt.run(train)
"""


@pytest.mark.campaign
def test_b19_what_a_restart_cannot_mend_is_not_retried(job: Any) -> None:
    before = script(job, B19.format(before="raise ValueError('hidden=0')", within="pass"), "before.py")
    assert job.run(*options("before", 2, "--max-restarts", "3"), before, str(job.out), name="before") == 81
    assert len({e["generation"] for e in job.events("before", "enter")}) == 1
    assert "before the first step" in job.text("before")
    same = script(job, B19.format(before="pass", within="if step == 7: raise ValueError('nan')"), "same.py")
    assert job.run(*options("same", 2, "--max-restarts", "9"), same, str(job.out), name="same") == 81
    assert len({e["generation"] for e in job.events("same", "enter")}) == 3
    assert "no progress" in job.text("same")
    fatal = script(job, B19.format(before="pass", within="raise rt.Fatal('no licence')"), "fatal.py")
    assert job.run(*options("fatal"), fatal, str(job.out / "f"), name="fatal") == 83
    assert len({e["generation"] for e in job.events("fatal", "enter")}) == 1


NOTICED = """
import sys, time, torch, ridethrough as rt
def train(run):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)])
    state = rt.State(model=model)
    ckpt = rt.Checkpointer(sys.argv[1] + "/ckpt", state)
    loaded = ckpt.load()
    for step in run.steps(loaded, 100000):
        with torch.no_grad():
            for p in model: p.fill_(step)
        if step == loaded.step + 1:
            open(sys.argv[1] + "/begun", "w").close()
        if (step - loaded.step) % 200 == 20:
            with run.phase("eval"):
                time.sleep(float(sys.argv[2]))
rt.run(train)
"""


@pytest.mark.parametrize(
    "count, eval_s", [(3, 1.0), pytest.param(100, 5.0, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])]
)
def test_c43_a_notice_at_any_moment_saves_a_whole_state(job: Any, count: int, eval_s: float) -> None:
    """In steps and, about half of them, within an evaluation."""
    import random

    import torch
    import torch.distributed.checkpoint as dcp

    draw = random.Random(43)
    train = script(job, NOTICED)
    for number in range(count):
        (job.out / "begun").unlink(missing_ok=True)
        name = f"n{number}"
        process = job.start(*options(name, 2, "--stop-grace", "8"), train, str(job.out), str(eval_s), name=name)
        wait_until((job.out / "begun").exists, job.text)
        time.sleep(draw.random() * 2 * eval_s)
        process.send_signal(signal.SIGTERM)
        assert job.wait(process) == 82, job.text()
        newest = max(
            (job.out / "ckpt").glob("step-*/COMMIT"), key=lambda p: int(p.parent.name[5:].split(".")[0])
        ).parent
        step = int(newest.name[5:].split(".")[0])
        assert {e["step"] for e in job.events(name, "finish")} == {step}
        loaded = {f"model.{i}": torch.zeros(2) for i in range(1000)}
        dcp.load(loaded, checkpoint_id=str(newest), no_dist=True)
        assert all(torch.equal(tensor, torch.full((2,), float(step))) for tensor in loaded.values())
