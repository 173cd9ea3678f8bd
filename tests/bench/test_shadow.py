"""The shadow benchmark of a user's script, with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ridethrough.bench.shadow import Shadow, advice
from ridethrough.bench.shadow_saves import added, saves_advice, steps_of
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.overrides import VARIABLE, overridden

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
    model = torch.nn.Linear(1000, 1000)
    saver = rt.Checkpointer(out / "ckpt", rt.State(model=model), every=50)
    saver.load()
    for step in run.steps(int(start[0]), 100_000, saver):
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
        command += ["--saves", "sync,async", "--budget", "150", "--json", str(out), "--", "{out}"]
        env = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        assert os.listdir(temporary) == [], "nothing is left"
    assert list(mine.iterdir()) == []
    found = json.loads(out.read_text())
    saves = {row["mode"]: row for row in found["saves"]}
    assert list(saves) == ["off", "sync", "async"] and saves["off"]["added_s_per_save"] is None
    assert saves["off"]["write_s"] is None and saves["sync"]["write_s"] > 0 and saves["async"]["intervals"] >= 2
    assert saves["sync"]["added_s_per_save"] > saves["async"]["added_s_per_save"]
    assert sum(line.startswith("saves ") for line in found["advice"]) == 2
    rows = {row["mechanism"]: row for row in found["results"]}
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


def test_steps_are_counted_in_whole_intervals_from_the_first_save_on() -> None:
    def ends(*seconds: float) -> list[dict[str, Any]]:
        return [{"kind": "step", "rank": 0, "step": n, "t1_ns": int(t * 1e9)} for n, t in enumerate(seconds, 1)]

    assert steps_of(ends(5, 9), 3)["step_s"] is None
    assert steps_of(ends(1, 2, 9, 10, 11), 3)["step_s"] is None
    found = steps_of(
        ends(1, 2, 9, 10, 11, 15, 16, 17, 20, 99), 3
    )  # the first save's 7 s do not count, nor what is over
    assert (found["intervals"], found["step_s"]) == (2, pytest.approx(11 / 6))
    rows = [{"mode": "off", "step_s": 1.0, "every": 5, "error": None}, {"mode": "sync", "step_s": 1.25, "every": 5}]
    control, sync = added([rows[0], {**rows[1], "error": None}])
    assert control["added_s_per_save"] is None and sync["added_s_per_save"] == 1.25
    assert saves_advice([control, sync]) == ["saves sync: one every 5 steps of 1.00 s adds 1.25 s, 20.0% of the time."]


def test_how_a_script_saves_can_be_told_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mode": "async", "every": 500, "memory": "auto"}
    monkeypatch.setenv(VARIABLE, "mode=sync,every=5,memory=off")
    assert overridden(given) == {"mode": "sync", "every": 5, "memory": "off"}
    monkeypatch.setenv(VARIABLE, "every=0")
    assert overridden(given) == {**given, "every": None}
    for nonsense in ("every=often", "slots=3", "mode"):
        monkeypatch.setenv(VARIABLE, nonsense)
        with pytest.raises(CheckpointError, match=VARIABLE):
            overridden(given)
