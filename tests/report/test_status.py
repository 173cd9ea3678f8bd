"""What a run is doing now: while it starts, runs, recovers, and after it ended or died; the wall clock has no say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_cases import around, event, worked_case, write
from rich.console import Console
from typer.testing import CliRunner

from ridethrough.cli.main import app
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.durations import duration
from ridethrough.report.live import life
from ridethrough.report.status import RankNow, read_status, status_of
from ridethrough.report.status_text import interesting, status_view


def seen(run_dir: Path) -> str:
    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(status_view(read_status(run_dir)))
    return console.export_text()


def test_through_a_life(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={"script": ["train.py"]}, command=[], schedule_hash=None)
    assert read_status(run.path).state == "starting"
    gr = {"generation": 0, "rank": 0}
    with Recorder(run.path, "agent") as agent, Recorder(run.path, "worker") as worker:
        agent.emit("job_start", slots=1, nodes=1, run_id="a")
        assert life(run.path).running
        assert read_status(run.path).state == "starting"
        worker.emit("enter", **gr)
        worker.emit("loop", **gr, step=0, total=40)
        t0 = time.monotonic_ns()
        worker.emit("save", **gr, step=0, event="staged", bytes=5)
        with Recorder(run.path, "keeper") as keeper:
            keeper.emit("host_memory", bytes=3_000_000_000, queued=1, queued_bytes=5)
            keeper.emit("host_memory", bytes=4_560_000_000, queued=1, queued_bytes=7)
        worker.emit("step", **gr, step=1, t0_ns=t0, t1_ns=t0 + 1000, t_ns=t0 + 1000, parts=[], loss=2.5, tokens=7)
        now = read_status(run.path)
        assert (now.state, now.step, now.total, now.loss) == ("running", 1, 40, 2.5)
        assert now.ranks[0].state == "partial_step"
        assert now.saves.backlog == [0] and now.saves.tiers["memory"].rollback_steps == 1
        assert (now.saves.host_bytes, now.saves.backlog_bytes) == (4_560_000_000, 7)
        assert "4.56 GB of snapshots" in seen(run.path)
        assert now.eta_s == pytest.approx(39 * now.step_s)
        report = {"class": "hang", "phase": "forward", "step": 2, "cause": "stuck", "detected_by": "heartbeat"}
        agent.emit("fault", **gr, worker="w", host="h", fault_ns=None, **report)
        now = read_status(run.path)
        assert now.state == "recovering" and now.open_incident is not None and now.open_incident["class"] == "hang"
        assert "hang of rank 0 in forward of step 2: stuck" in seen(run.path)
    assert not life(run.path).running
    assert read_status(run.path).state == "died"
    run.finish(80, "restarts exhausted")
    assert read_status(run.path).state == "ended"
    assert "code 80: restarts exhausted" in seen(run.path)


def test_the_figures_of_a_run_that_ended(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={"max_restarts": 3}, command=[], schedule_hash=None)
    write(run.path, "h-coordinator-1", around())
    saves = [
        event("save", t, generation=0, rank=0, step=s, event=e) for t, s, e in ((4, 4, "staged"), (5, 4, "committed"))
    ]
    write(run.path, "h-worker-2", sorted([*worked_case(), *saves], key=lambda e: e["t_ns"]))
    run.finish(0, "done")
    now = status_of(read_run(run.path), running=False)
    assert now.training_goodput == pytest.approx(10 / 18.5)
    assert (now.step, now.num_incidents, now.num_recovered, now.steps_lost) == (10, 1, 1, 3)
    assert now.saves.tiers["disk"].rollback_steps == 6 and now.saves.tiers["disk"].age_s == 13.5
    text = seen(run.path)
    for part in (
        "54.05%",
        "1 incident (1 exception), all injected; 1 recovered, 3 steps lost",
        "step 4, 13.5 s old, 6 steps behind",
    ):
        assert part in text
    result = CliRunner().invoke(app, ["status", "a", "--runs", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["saves"]["tiers"]["disk"]["step"] == 4


def test_few_of_many_ranks() -> None:
    ranks = [RankNow(n, "step", 100 - (n == 700), 0.0, 0.1) for n in range(1000)]
    assert len(interesting(ranks, 16)) == 16
    assert 700 in [rank.rank for rank in interesting(ranks, 16)]
    assert interesting(ranks[:9], 16) == ranks[:9]


def test_durations() -> None:
    assert [duration(s) for s in (4.21, 185, 7800, 273_600)] == ["4.21 s", "3 min 05 s", "2 h 10 min", "3 d 4 h"]


JUMPS = """
import os, time
here, true, true_ns = os.path.dirname(__file__), time.time, time.time_ns
def off():
    jumped = [seconds for seconds in (-3600, 10800) if os.path.exists(f"{here}/{seconds}")]
    return (300 if os.environ.get("RANK") == "1" else 0) + sum(jumped)
time.time = lambda: true() + off()
time.time_ns = lambda: true_ns() + off() * 10**9
"""


@pytest.mark.ranks
def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """C52: an hour back at step 5, two forth from true time at step 8, in launcher and workers, one rank five minutes
    off: no restart, no negative time, sums as ever."""
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    command = [sys.executable, "-m", "ridethrough", "train", "--nproc-per-node", "2", "--steps", "40", "--quiet"]
    command += ["--checkpoint-every", "10", "--log-every", "1", "--runs", str(tmp_path / "runs"), "--run-id", "job"]
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    logs, by_s = tmp_path / "runs" / "job" / "logs", time.monotonic() + 120
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for step, seconds in ((5, -3600), (8, 10800)):
                while not any(f"step {step}/40" in log.read_text() for log in logs.glob("*-rank0.log")):
                    assert process.poll() is None and time.monotonic() < by_s
                    time.sleep(0.02)
                (tmp_path / f"{seconds}").touch()
            assert process.poll() is None, "over before the clock jumped: the test tests nothing"
            assert process.wait(120) == 0
        finally:
            process.kill()
    ledger = read_run(tmp_path / "runs" / "job")
    headers = [e for e in ledger.events if e["kind"] == "header"]
    offsets = {round((e["wall_ns"] - e["mono_ns"]) / 60e9) for e in headers}
    assert len(offsets) > 1, "the clocks did not differ: the test tests nothing"
    assert ledger.incidents == []
    assert sum(ledger.part.states_ns.values()) == ledger.part.wall_ns * 2
    assert min(ledger.part.states_ns.values()) >= 0
    assert 0 < ledger.part.training_goodput < 1 and ledger.part.wall_ns < 120 * 10**9
    assert status_of(ledger, running=False).saves.tiers["disk"].age_s >= 0
