"""What watching costs, and that it stays quiet: a healthy job is left alone, whatever the machine does to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from restart_job import HERE, left_behind, read

from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.ledger.recorder import Recorder
from ridethrough.restart.generation import Place, Stage
from ridethrough.restart.run_object import Run

STEPS = 3000
PHASES = ("data", "forward", "backward", "optimizer")


def test_a_step_costs_far_less_than_half_a_per_cent(tmp_path: Path) -> None:
    """CPU seconds of the added code per step, with four phases, the page and the ledger; a step of 0.5 s may cost
    2.5 ms."""
    (tmp_path / "events").mkdir()
    place = Place(0, 1, 0, 0, 1, 1, 0, "127.0.0.1", 0, "", 0, {}, Policy())
    page = HeartbeatPage(tmp_path / "page", create=True)
    recorder = Recorder(tmp_path, "worker")
    run = Run(place, torch.device("cpu"), Stage(1), run_dir=tmp_path, recorder=recorder, page=page, interrupter=None)
    begun_s = time.process_time()
    for _ in run.steps(0, STEPS):
        for name in PHASES:
            with run.phase(name):
                pass
        run.log(loss=1.0)
    added_s = (time.process_time() - begun_s) / STEPS
    print(f"watching: {added_s * 1e6:.1f} us of CPU per step, {added_s / 0.5:.4%} of a step of 0.5 s")
    assert added_s < 0.0025 / 2


@pytest.mark.ranks
@pytest.mark.campaign
def test_agent_and_workers_stopped_together_give_no_restart(tmp_path: Path) -> None:
    mark = f"RESTART_TEST={tmp_path}"
    options = '{"kind": "ddp", "total": 400, "step_s": 0.02}'
    command = [sys.executable, "-m", "ridethrough", "run", "--nproc-per-node", "2", "--runs", str(tmp_path / "runs")]
    command += ["--run-id", "job", str(HERE / "trainee.py"), options]
    job = subprocess.Popen(command, env={**os.environ, "RESTART_TEST": str(tmp_path), "OMP_NUM_THREADS": "1"})
    run = tmp_path / "runs" / "job"
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(e["kind"] == "step" and e["step"] > 100 for e in read(run)):
        time.sleep(0.2)
    pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and _marked(p, mark)]
    assert len(pids) >= 4
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(10)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert job.wait(100) == 0
    events = read(run)
    assert [e for e in events if e["kind"] in ("incident", "verdict")] == []
    longest_ms = max(e["t1_ns"] - e["t0_ns"] for e in events if e["kind"] == "step") / 1e6
    assert longest_ms > 9_000
    assert left_behind(mark) == []


_SLOW_ONCE = """
import time
import torch, torch.distributed as dist
import ridethrough as rt

def train(run):
    for step in run.steps(0, 40):
        time.sleep(4.0 if (run.rank, step) == (1, 30) else 0.02)
        dist.all_reduce(torch.ones(1))

rt.run(train)
"""


@pytest.mark.ranks
def test_observing_notes_verdicts_and_acts_on_none(jobs: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SLOW_ONCE)
    job = jobs(script, ranks=2, flags=["--observe"])
    assert job.code == 0, job.out
    assert {(v["rank"], v["step"], v["observe"]) for v in job.of("verdict")} == {(1, 30, True)}
    assert job.incidents == [] and job.spawns() == {0: 1, 1: 1}


_SLOW_PHASES = """
import json, sys, time
import torch, torch.distributed as dist
import ridethrough as rt

SECONDS = json.loads(sys.argv[1])

def train(run):
    slow = SECONDS[run.generation - 1] if run.generation <= len(SECONDS) else {}
    rest = lambda name: time.sleep(slow.get(name, 0.0) if run.rank == 1 else 0.0)
    with run.phase("load"):
        rest("load")
    for step in run.steps(0, 30):
        if step == 1:
            rest("step")
        for at, name in ((15, "data"), (20, "save"), (25, "eval")):
            with run.phase(name):
                rest(name if step == at else "")
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))

rt.run(train)
"""


@pytest.mark.ranks
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_b32_slow_phases_are_left_alone_and_a_hang_in_each_is_found(jobs: Any, tmp_path: Path) -> None:
    """Longer than a step may take, within the phase's own limit; then far beyond it, in each phase once."""
    floor_s, slow_s, cap_s = 2.0, 6.0, 10.0
    script = tmp_path / "script.py"
    script.write_text(_SLOW_PHASES)
    phases = ("load", "step", "data", "save", "eval")
    named = ("load", "first_step", "data", "save", "eval")
    policy = {"hang_floor_s": floor_s, **{f"{name}_limit_s": cap_s for name in named}}
    healthy = jobs(script, json.dumps([dict.fromkeys(phases, slow_s)]), ranks=2, policy=policy)
    assert healthy.code == 0 and healthy.incidents == [], healthy.out
    policy |= dict.fromkeys(("max_no_progress", "max_same_fault", "max_same_before_any_step"), 99)
    hung = jobs(script, json.dumps([{name: 60.0} for name in phases]), ranks=2, policy=policy)
    assert hung.code == 0, hung.out
    assert hung.told("class", "rank", "phase") == [("hang", 1, name) for name in named]
    for incident in hung.incidents:
        assert cap_s <= (incident["declared_ns"] - incident["fault_ns"]) / 1e9 < 60


@pytest.mark.ranks
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_every_kind_of_hang_is_found_at_learned_deadlines(jobs: Any) -> None:
    """Steps of half a second; prints after how long each was found."""
    kinds = ["hang_loop", "hang_lock", "hang_skip_collective", "hang_native", "hang_native_gil", "sigstop"]
    faults = [f"{kind}:{i % 4}:{10 + 8 * i}" for i, kind in enumerate(kinds)]
    job = jobs(options={"total": 60, "step_s": 0.5}, faults=faults, timeout_s=400)
    assert job.code == 0, job.out
    assert job.told("class", "rank") == [("hang", i % 4) for i in range(len(kinds))]
    fired = [e["t_ns"] for e in job.of("fault_injected")]
    for kind, then_ns, incident in zip(kinds, fired, job.incidents, strict=True):
        found_s = (incident["declared_ns"] - then_ns) / 1e9
        print(f"{kind}: found after {found_s:.1f} s")
        assert found_s < 50


def _marked(pid: str, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


_SOAK = """
import shutil, sys, time
import torch, torch.distributed as dist
import ridethrough as rt

seconds, root = sys.argv[1].split(" ", 1)
END = time.monotonic() + float(seconds)

def train(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    backend = "inductor" if shutil.which("c++") else "aot_eager"
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(model), backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = rt.State(model=model, optimizer=optimizer)
    checkpointer = rt.Checkpointer(root, state, every=40)
    more = torch.ones(1)
    for step in run.steps(checkpointer.load(), 1_000_000):
        with run.phase("data"):
            time.sleep(8.0 if step % 97 == 0 and run.rank == 1 else 0.0)
            x = torch.randn(32, 64)
        with run.phase("forward"):
            time.sleep(20.0 if step == 1 and run.rank == 0 else 0.1)
            loss = model(x).pow(2).mean()
        with run.phase("backward"):
            loss.backward()
        with run.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            with run.phase("eval"), torch.no_grad():
                time.sleep(6.0)
        if step % 131 == 0:
            with run.phase("save"):  # waits where storage stands still
                checkpointer.save(step, durable=True).committed(120.0)
        more.fill_(float(time.monotonic() < END))
        dist.all_reduce(more, dist.ReduceOp.MIN)
        if more.item() == 0:
            break
    checkpointer.close()

rt.run(train)
"""


@contextlib.contextmanager
def _storage_that_stands_still(folder: Path) -> Iterator[Path]:
    """A file system of its own that takes no write for 12 of every 40 seconds, the first among them. Without root and
    loop devices: a folder, and no such thing."""
    image, root = folder / "image", folder / "frozen"
    root.mkdir()
    image.touch(0o600)
    os.truncate(image, 256 << 20)
    over = threading.Event()

    def freeze() -> None:
        while not over.is_set():
            subprocess.run(["fsfreeze", "-f", root], check=True)
            over.wait(12.0)
            subprocess.run(["fsfreeze", "-u", root], check=True)
            over.wait(28.0)

    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, root], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"storage never stands still: {error}")
        yield root
        return
    freezer = threading.Thread(target=freeze)
    freezer.start()
    try:
        yield root
    finally:
        over.set()
        freezer.join()
        subprocess.run(["umount", root], check=True)


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_half_an_hour_without_a_false_alarm(jobs: Any, tmp_path: Path) -> None:
    """Evaluation, saves to storage that stands still, slow data, compilation and a first step of 20 s, on a machine
    that is busy."""
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    script = tmp_path / "soak.py"
    script.write_text(_SOAK)
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with _storage_that_stands_still(tmp_path) as root:
            job = jobs(script, f"{60 * minutes} {root}", ranks=4, timeout_s=60 * minutes + 300)
    finally:
        burner.kill()
        burner.wait()
    assert job.code == 0, job.out
    assert job.of("verdict") == [] and job.incidents == []
