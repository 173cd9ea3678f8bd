"""From the longest times of a run to the limits of the next one, and back to them by search and comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_cases import around, event, worked_case, write
from typer.testing import CliRunner

from ridethrough.cli.main import app
from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.compare import compare


@pytest.mark.ranks
@pytest.mark.campaign
def test_what_calibrate_writes_is_the_policy_of_the_next_run_and_is_found_again(tmp_path: Path) -> None:
    """An evaluation of 70 s was seen: the limit becomes 210 s, in a job that is then started with it."""
    healthy = create_run(tmp_path, run_id="healthy", config={}, command=[], schedule_hash=None)
    evaluation = [
        event("phase", t, generation=1, rank=0, phase="eval", edge=e) for t, e in ((20, "begin"), (90, "end"))
    ]
    write(healthy.path, "h-coordinator-1", [e for e in around() if e["kind"] != "job_end"])
    write(healthy.path, "h-worker-2", [*worked_case(), *evaluation])
    limits, script = tmp_path / "limits.json", tmp_path / "nothing.py"
    script.write_text("")
    arguments = ["calibrate", "healthy", "--runs", str(tmp_path), "--json", str(limits)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    command = [sys.executable, "-m", "ridethrough", "run", "--nproc-per-node", "1", "--policy", str(limits), "--quiet"]
    environment = {**os.environ, "RIDETHROUGH_RUNS": str(tmp_path)}
    subprocess.run([*command, "--run-id", "next", str(script)], env=environment, check=True, timeout=150)

    policy = read_run(tmp_path / "next").run["config"]["policy"]
    proposed = json.loads(limits.read_text())["policy"]
    assert proposed["eval_limit_s"] == 210.0 and policy == proposed
    plain = subprocess.run([*command[:6], "--run-id", "plain", str(script)], env=environment, check=True, timeout=150)
    assert plain.returncode == 0
    changed = compare(read_run(tmp_path / "plain"), read_run(tmp_path / "next")).config
    assert changed["policy.eval_limit_s"] == (None, 210.0)
    found = CliRunner().invoke(app, ["runs", "search", "eval_limit_s 210", "--runs", str(tmp_path), "--json"]).stdout
    assert [run["run_id"] for run in json.loads(found)] == ["next"]
