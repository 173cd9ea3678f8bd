"""A Hugging Face Trainer rides through faults: its own loop, its own checkpoints, real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridethrough.ledger.reading import read_events
from ridethrough.train.trainer_callback import newest_checkpoint

pytestmark = pytest.mark.ranks
JOB = Path(__file__).with_name("trainer_job.py")
STEPS = 14


def trained(folder: Path, *faults: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two ranks to the end: what each wrote there, and the run's events."""
    folder.mkdir()
    command = [sys.executable, "-m", "ridethrough", "run", "--nproc-per-node", "2", "--runs", str(folder / "runs")]
    command += ["--run-id", "job", *(f"--fault-at={fault}" for fault in faults), str(JOB), str(folder), str(STEPS)]
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        command,
        check=False,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ends = [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(2)]
    return ends, read_events(folder / "runs" / "job")


@pytest.mark.timeout(400)
@pytest.mark.campaign
def test_a_trainer_goes_on_from_its_newest_checkpoint_and_ends_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    undisturbed, _ = trained(tmp_path / "a")
    ends, events = trained(tmp_path / "b", "exception:0:6:step", "sigkill:1:10:step")
    assert [end["step"] for end in ends] == [STEPS, STEPS]
    assert [end["sum"] for end in ends] == [end["sum"] for end in undisturbed]
    assert [end["generation"] for end in ends] == [3, 3]
    assert all(end["resumed"].endswith("checkpoint-8") for end in ends)
    incidents = [event for event in events if event["kind"] == "incident"]
    assert [(i["class"], i["rank"], i["rung"]) for i in incidents] == [
        ("exception", 0, "in_process"),
        ("sigkill", 1, "replace_process"),
    ]
    phases = {event["phase"] for event in events if event["kind"] == "phase" and event["edge"] == "end"}
    assert {"eval", "save"} <= phases


def test_a_save_that_was_cut_off_is_not_the_newest_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-16").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
