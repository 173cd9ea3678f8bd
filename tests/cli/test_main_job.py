"""The main job as a user starts it: `ridethrough demo` and `ridethrough train` through real faults on real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_job import Job, wait_until

from ridethrough.cli.proof import why_void
from ridethrough.faults.phases import PHASES, RECOVERY_PHASES
from ridethrough.faults.schedule import Schedule
from ridethrough.ledger.summary import read_run

_STEPS = 16
_SMALL = ["--num-layers=1", "--seq-len=32", f"--steps={_STEPS}", "--warmup=2", "--dropout=0.1", "--checkpoint-every=4"]
_KINDS = {"exception": "in_process", "hang": "in_process", "sigkill": "replace_process"}


def train(job: Job, run_id: str, *options: str) -> dict[str, Any]:
    """Train to the end; what `runs show --json` says of it, and the PIDs that each rank had, under "pids"."""
    code = job.run("train", "--nproc-per-node=2", f"--run-id={run_id}", *_SMALL, *options, name=run_id)
    assert code == 0, job.text(run_id)
    return shown(job, run_id)


def shown(job: Job, run_id: str) -> dict[str, Any]:
    assert job.run("runs", "show", run_id, f"--json={job.folder / 'shown.json'}", name="shown") == 0, job.text("shown")
    result: dict[str, Any] = json.loads((job.folder / "shown.json").read_text())
    ledger = result["ledger"]
    assert sum(ledger["states_ns"].values()) == ledger["wall_ns"] * ledger["slots"]
    result["pids"] = {}
    for spawn in job.events(run_id, "worker_spawn"):
        result["pids"].setdefault(spawn["rank"], []).append(spawn["pid"])
    return result


@pytest.fixture(scope="module")
def undisturbed(job: Job) -> str:
    """Hash of the final parameters and optimizer of the run without faults."""
    result = train(job, "undisturbed")
    assert result["incidents"] == [] and result["steps"] == _STEPS
    return str(result["final_hash"])


@pytest.mark.parametrize("kind", _KINDS)
def test_each_fault_on_the_first_and_the_last_rank_changes_no_bit(job: Job, undisturbed: str, kind: str) -> None:
    result = train(job, kind, f"--fault-at={kind}:0:6", f"--fault-at={kind}:1:11:backward")
    assert result["final_hash"] == undisturbed
    assert [(i["rank"], i["rung"]) for i in result["incidents"]] == [(0, _KINDS[kind]), (1, _KINDS[kind])]
    assert all(i["steps_lost"] <= 1 for i in result["incidents"])
    lives = 2 if kind == "sigkill" else 1
    assert {rank: len(pids) for rank, pids in result["pids"].items() if rank is not None} == {0: lives, 1: lives}


_HUNG_AFTER_S = {"data": 8, "save": 8, "eval": 8, "init": 30, "load": 30, "first_step": 30}


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_each_fault_in_each_phase(job: Job, undisturbed: str, kind: str, rank: int, phase: str) -> None:
    """Under caps that a hang in any phase runs into; their defaults are minutes."""
    run_id = f"{kind}-{rank}-{phase}"
    policy = job.folder / "caps.json"
    caps = {f"{name}_limit_s": seconds for name, seconds in _HUNG_AFTER_S.items()}
    policy.write_text(json.dumps({**caps, "rebuild_limit_s": 30}))
    faults = [f"--fault-at={kind}:{rank}:6:{phase}"]
    if phase in RECOVERY_PHASES:  # of the generation after another fault
        faults.append(f"--fault-at=exception:{1 - rank}:6")
    launch = ["run", "--policy", str(policy), "--nproc-per-node=2", f"--run-id={run_id}", *faults]
    process = job.start(*launch, "-m", "ridethrough.train", *_SMALL, "--eval-every=8", name=run_id)
    assert job.wait(process, 240) == 0, job.text(run_id)
    result = shown(job, run_id)
    assert result["final_hash"] == undisturbed
    assert len(result["incidents"]) == 1, "a fault before the new generation's first step is of the same incident"
    injected = [(e["rank"], e["phase"]) for e in job.events(run_id, "fault_injected")]
    entered = "step" if phase == "first_step" else phase
    assert len(injected) == len(faults) and (rank, entered) in injected


def test_c56_a_plan_of_a_crash_a_hang_and_a_damaged_save_fires_each_once(job: Job, undisturbed: str) -> None:
    check_c56(job, undisturbed, "c56")


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_c56_the_same_plan_and_seed_twice_and_another_seed(job: Job, undisturbed: str) -> None:
    assert check_c56(job, undisturbed, "c56-a") == check_c56(job, undisturbed, "c56-b")
    drawn = ["--fault-count=3", "--fault-types=exit,hang,exception", "--checkpoint-mode=sync"]
    logs = {}
    for run_id, seed in (("seed-7", 7), ("seed-7-again", 7), ("seed-8", 8)):
        assert train(job, run_id, *drawn, f"--fault-seed={seed}")["final_hash"] == undisturbed
        assert json.loads((job.folder / "runs" / run_id / "faults.json").read_text())["seed"] == seed
        logs[run_id] = fired(job, run_id)
    assert logs["seed-7"] == logs["seed-7-again"] != logs["seed-8"]
    assert [len(log) for log in logs.values()] == [3, 3, 3]


def check_c56(job: Job, undisturbed: str, run_id: str) -> list[tuple[int, int, str]]:
    """The plan of the case, in a job that waits for each save and loads from storage: what has fired."""
    plan = ["--fault-at=exit:1:7", "--fault-at=hang:0:12", "--fault-at=corrupt_save:0:15"]
    result = train(job, run_id, *plan, "--checkpoint-mode=sync")
    assert result["final_hash"] == undisturbed
    told = [(i["class"], i["rank"], i["rung"]) for i in result["incidents"]]
    assert told == [("exit", 1, "replace_process"), ("hang", 0, "in_process"), ("corruption", 0, "in_process")]
    loads = [load for load in job.events(run_id, "load") if load["rank"] == 0]
    assert [load["step"] for load in loads] == [0, 4, 8, 8], "the damaged save of step 12 is not believed"
    (path, reason), *_ = [pair for pair in loads[-1]["rejected"] if "step-12." in pair[0]]
    assert "differ from their committed hash" in reason and f"{path} not used" in job.text(run_id)
    return fired(job, run_id)


def fired(job: Job, run_id: str) -> list[tuple[int, int, str]]:
    return sorted((e["step"], e["rank"], e["fault_kind"]) for e in job.events(run_id, "fault_injected"))


@pytest.mark.campaign
def test_slow_storage_and_little_memory_restart_nothing(job: Job, undisturbed: str) -> None:
    result = train(job, "degraded", "--fault-at=slow_storage:0:3", "--fault-at=memory_pressure:1:5")
    assert result["final_hash"] == undisturbed and result["incidents"] == []
    assert len(job.events("degraded", "fault_injected")) == 2
    slowest = max(e["seconds"] for e in job.events("degraded", "save") if e["event"] == "committed")
    assert slowest > 2, "a save has more than ten file operations, each takes 0.2 s longer"


def test_full_storage_is_one_clear_end(job: Job) -> None:
    options = ["--nproc-per-node=2", "--run-id=refused", *_SMALL, "--fault-at=full_storage:0:3"]
    assert job.run("train", *options, name="refused") == 83, job.text("refused")
    assert "No space left on device" in job.text("refused") and "free space or lower `keep`" in job.text("refused")
    assert len(job.events("refused", "plan")) == 1, "it was tried again"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_fault_that_cannot_be_here_ends_the_job_before_its_first_step(job: Job) -> None:
    options = ["--nproc-per-node=2", "--run-id=no-gpu", *_SMALL, "--fault-at=device_assert:0:3"]
    assert job.run("train", *options, name="no-gpu") == 81, job.text("no-gpu")
    assert "UNAVAILABLE: this process has no CUDA device" in job.text("no-gpu")
    assert job.events("no-gpu", "step") == []


def test_without_the_random_streams_the_end_is_another(job: Job, undisturbed: str) -> None:
    """The comparison can fail: the same job and fault, but what dropout draws next is not restored."""
    assert train(job, "no-rng", "--no-restore-rng", "--fault-at=sigkill:1:6")["final_hash"] != undisturbed


def test_the_demo_proves_itself(job: Job) -> None:
    """The demo at reduced length: four ranks, and faults of the three kinds in a row."""
    out = job.folder / "demo.json"
    options = ["--steps=30", "--checkpoint-every=10", "--fault-count=3", "--fault-seed=43", "--run-id=demo"]
    assert job.run("demo", *options, f"--json={out}", name="demo") == 0, job.text("demo")
    result = json.loads(out.read_text())
    assert result["bitwise_equal"] is True and result["final_hash"] == result["control_hash"]
    assert result["steps"] == 30 and len(result["incidents"]) == 3
    assert {e["fault_kind"].partition("_")[0] for e in job.events("demo", "fault_injected")} == set(_KINDS)
    assert shown(job, "demo")["training_goodput"] == result["training_goodput"]
    assert (job.folder / "runs" / "demo" / "report.html").stat().st_size > 1000
    assert "bit for bit: yes" in job.text("demo")
    run = job.folder / "runs" / "demo"
    ledger, schedule = read_run(run), Schedule.load(run / "faults.json")
    assert why_void(ledger, schedule, result["control_hash"]) == []
    (why,) = why_void(replace(ledger, incidents=ledger.incidents[1:]), schedule, result["control_hash"])
    assert ledger.incidents[0].injected[0] in why, "a fault that nobody saw voids the proof"


@pytest.mark.campaign
def test_a_campaign_proves_each_round_and_keeps_none_that_passed(job: Job) -> None:
    out = job.folder / "campaign.json"
    options = ["--rounds=2", "--ranks=2", "--steps=12", "--fault-count=1", "--fault-types=exception,sigkill"]
    before = sorted((job.folder / "runs").iterdir())
    assert job.run("chaos", "run", *options, f"--json={out}", name="campaign") == 0, job.text("campaign")
    result = json.loads(out.read_text())
    assert [row["passed"] for row in result["rounds"]] == [True, True]
    assert [row["fault_seed"] for row in result["rounds"]] == [42, 43]
    assert all(row["bitwise_equal"] and len(row["incidents"]) == 1 for row in result["rounds"])
    assert result["classes"]["all"]["count"] == 2 and result["classes"]["all"]["recovery_rate"] == 1.0
    assert sorted((job.folder / "runs").iterdir()) == before


def test_ctrl_c_saves_and_ends_and_the_same_command_goes_on(job: Job, undisturbed: str) -> None:
    options = ["--fault-at=slow:0:5"]
    process = job.start("train", "--nproc-per-node=2", "--run-id=stopped", *_SMALL, *options, name="stopped")
    wait_until(lambda: job.events("stopped", "fault_injected"), lambda: job.text("stopped"))
    os.kill(process.pid, signal.SIGINT)
    assert job.wait(process) == 128 + signal.SIGINT, job.text("stopped")
    before = {e["step"] for e in job.events("stopped", "step")}
    assert max(before) < _STEPS
    result = train(job, "stopped", *options)
    assert result["final_hash"] == undisturbed
    assert result["steps"] == _STEPS


@pytest.mark.root
def test_a_full_disk_is_one_clear_end(job: Job, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", small], check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        options = ["--nproc-per-node=2", "--run-id=full", f"--checkpoint-dir={small}", *_SMALL]
        assert job.run("train", *options, name="full") == 83, job.text("full")
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert "No space left on device" in job.text("full") and "free space or lower `keep`" in job.text("full")
    assert len(job.events("full", "plan")) == 1, "it was tried again"


@pytest.mark.root
def test_a_run_folder_without_space_costs_no_training(job: Job, tmp_path: Path) -> None:
    """Events, logs and the result cannot be written any more; a fault is recovered from all the same."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        where = [f"--runs={small}", f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--run-id=mute"]
        process = job.start("train", "--nproc-per-node=2", *_SMALL, *where, "--fault-at=sigkill:1:12", name="mute")
        events = small / "mute" / "events"
        trains = '"kind":"step"'
        wait_until(lambda: any(trains in f.read_text() for f in events.glob("*-worker-*")), lambda: job.text("mute"))
        with contextlib.suppress(OSError), (small / "fill").open("wb", buffering=0) as fill:
            while fill.write(bytes(512)):
                pass
        assert job.wait(process) == 0, job.text("mute")
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert "run.json, which cannot be written: No space left on device" in job.text("mute")
    assert "Traceback" not in job.text("mute")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--preset", "huge"], "--preset huge"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--nproc-per-node", "100000"], "ranks need about"),
        (["--checkpoint-dir", "/proc/nowhere"], "--checkpoint-dir /proc/nowhere: /proc cannot be written"),
        (["--fault-count", "99", "--steps", "20"], "ask for at most"),
        (["--fault-types", "exception", "--fault-type-weights", "1,2"], "2 weights for 1 fault types"),
        (["--steps", "0"], "--steps 0"),
        (["--run-id", "undisturbed", "--steps", "99"], "undisturbed"),
    ],
)
def test_bad_input_starts_nothing(job: Job, undisturbed: str, options: list[str], says: str, tmp_path: Path) -> None:
    log = f"bad{tmp_path.name}"
    runs = sorted((job.folder / "runs").iterdir())
    assert job.run("train", *_SMALL, *options, name=log) == 2, job.text(log)
    lines = job.text(log).splitlines()[1:]
    assert len(lines) == 1 and says in lines[0], lines
    assert sorted((job.folder / "runs").iterdir()) == runs
