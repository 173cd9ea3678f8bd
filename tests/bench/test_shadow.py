"""The shadow benchmark of a user's script, with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ridethrough.bench.shadow import Shadow, advice

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import ridethrough as rt

out = Path(sys.argv[1])

def train(run):
    found = sorted(out.glob("*.step"))
    start = torch.tensor([float(found[-1].stem) if found else 0.0])
    dist.broadcast(start, 0)
    for step in run.steps(int(start[0]), 100_000):
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        if run.rank == 0 and step % 2 == 0:
            (out / f"{step:06d}.step").touch()

rt.run(train)
"""


@pytest.mark.ranks
@pytest.mark.campaign
def test_a_script_without_end_is_measured_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    mine = tmp_path / "mine"
    mine.mkdir()
    out = tmp_path / "shadow.json"
    with tempfile.TemporaryDirectory(prefix="rtb-", dir="/tmp") as temporary:
        command = [sys.executable, "-m", "ridethrough", "bench", "shadow", "--script", str(script)]
        command += ["--folder", str(mine), "--mechanisms", "ridethrough,torchrun", "--faults", "sigkill"]
        command += ["--budget", "150", "--json", str(out), "--", "{out}"]
        env = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        assert os.listdir(temporary) == [], "nothing is left"
    assert list(mine.iterdir()) == []
    rows = {row["mechanism"]: row for row in json.loads(out.read_text())["results"]}
    for row in rows.values():
        assert row["error"] is None and 0 <= row["detected_s"] <= row["first_step_s"]
    assert rows["ridethrough"]["processes_replaced"] == 1 and rows["torchrun"]["processes_replaced"] == 2
    assert rows["ridethrough"]["first_step_s"] < rows["torchrun"]["first_step_s"]


def test_the_advice_has_its_arithmetic() -> None:
    shadow = Shadow([], ["ridethrough", "torchrun"], ["sigkill"], 8, 60.0, 5, Path(), "", mtbf_h=24.0)
    row = {"fault": "sigkill", "step_s": 2.0, "write_s": 10.0}
    rows = [
        {**row, "mechanism": "ridethrough", "caught_up_s": 2.0},
        {**row, "mechanism": "torchrun", "caught_up_s": 62.0},
    ]
    first, second = advice(rows, shadow)
    assert "0.93 rank-hours a week" in first, "60 s x 8 ranks x 7 failures"
    assert "every 657 steps" in second and "every 6 steps" in second
    assert "larger --budget" in advice([{**row, "mechanism": "torchrun", "caught_up_s": None}], shadow)[0]
