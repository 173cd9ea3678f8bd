"""Real jobs of the recovery matrix, at its smallest size; and what it leaves behind when it is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridethrough.bench.place import Place, free_port, marked

pytestmark = pytest.mark.ranks
SMALL = ["--ranks", "2", "--dim", "32", "--layers", "1", "--steps", "6", "--save-every", "2", "--fault-at", "4:1"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Unix sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="rtb-", dir="/tmp") as name:
        (Path(name) / Path(name).name).mkdir()
        yield Path(name) / Path(name).name


def bench(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "TMPDIR": str(folder), "OUTER_MARK": folder.name}
    command = ["env", "--default-signal=INT"]  # a shell's background jobs ignore it
    command += [sys.executable, "-m", "ridethrough", "bench", "recovery", *SMALL, *args]
    with open(folder.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def nothing_left(folder: Path) -> bool:
    return not list(folder.glob("rt-bench-*")) and not list(marked(f"OUTER_MARK={folder.name}"))


@pytest.mark.campaign
def test_two_mechanisms_meet_the_same_fault(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["--mechanisms", "ridethrough,restart-job,torchft", "--faults", "sigkill", "--reps", "1"]
    assert bench(folder, *asked, "--json", str(out)).wait(120) == 0, folder.with_suffix(".log").read_text()
    result = json.loads(out.read_text())
    assert [row["mechanism"] for row in result["missing"]] == ["torchft"], "a missing peer is said"
    rows: dict[str, dict[str, Any]] = {row["mechanism"]: row for row in result["results"]}
    for row in rows.values():
        assert row["error"] is None and row["final_equal"] is True
        assert 0 < row["detected_s"] <= row["all_out_s"] < row["first_step_s"] <= row["caught_up_s"]
        assert 0 < row["training_goodput"] < row["infrastructure_goodput"] < 1
    assert rows["ridethrough"]["processes_replaced"] == 1, "only the dead one"
    assert rows["restart-job"]["processes_replaced"] == 2, "all of them"
    assert rows["ridethrough"]["first_step_s"] < rows["restart-job"]["first_step_s"]
    assert len(result["schedule_hash"]) == 16
    assert nothing_left(folder)


def test_cut_off_it_leaves_no_process_and_no_folder(folder: Path) -> None:
    process = bench(folder, "--mechanisms", "ridethrough", "--reps", "1")
    end = time.monotonic() + 60
    while len(list(marked(f"OUTER_MARK={folder.name}"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert nothing_left(folder)


@pytest.mark.campaign
def test_cut_off_later_it_keeps_what_was_measured(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["--mechanisms", "ridethrough", "--faults", "exception", "--reps", "9"]
    process = bench(folder, *asked, "--json", str(out))
    end = time.monotonic() + 150
    while "ridethrough exception 0:" not in folder.with_suffix(".log").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    result = json.loads(out.read_text())
    assert result["cut_off"] is True and 1 <= len(result["results"]) < 9
    assert nothing_left(folder)


def test_a_place_ends_what_left_its_session_and_knows_when_it_ended() -> None:
    code = "import os, socket, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
    code += "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); time.sleep(600)"
    with Place() as place:
        place.start([sys.executable, "-c", code, str(place.folder / "roll")], "one", dict(os.environ))
        end = time.monotonic() + 30
        while not (alone := place.alive()) and time.monotonic() < end:
            time.sleep(0.02)
        while place.processes["one"].poll() is None:
            time.sleep(0.02)
        time.sleep(0.5)
        (pid,) = place.alive()
        before = time.monotonic_ns()
        place.stop()
        while pid not in place.ended_ns and time.monotonic() < end:
            time.sleep(0.02)
        assert place.ended_ns[pid] >= before and alone
        folder = place.folder
    assert not folder.exists()


def test_free_ports_are_neighbours() -> None:
    assert free_port(3) > 1024
