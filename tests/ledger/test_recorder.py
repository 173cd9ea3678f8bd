"""The event file: private, one line per event, and complete up to the last event of a killed process."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridethrough.ledger.recorder import Recorder


def lines(path: Path | None) -> list[dict]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_header_then_events_in_a_private_file(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Recorder(tmp_path, "worker") as recorder:
            recorder.emit("step", generation=0, rank=2, step=1, t0_ns=5, t1_ns=9, t_ns=9)
    finally:
        os.umask(old)
    assert recorder.path is not None
    assert recorder.path.name.endswith(f"-worker-{os.getpid()}.jsonl")
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700
    header, step = lines(recorder.path)
    assert header["kind"] == "header" and header["pid"] == os.getpid() and header["mono_ns"] == header["t_ns"]
    assert step == {"t_ns": 9, "kind": "step", "generation": 0, "rank": 2, "step": 1, "t0_ns": 5, "t1_ns": 9}
    recorder.emit("step")  # closed: no-op
    assert len(lines(recorder.path)) == 2


def test_no_run_folder_is_a_no_op_and_roles_are_checked() -> None:
    Recorder(None, "worker").emit("enter")
    with pytest.raises(ValueError, match="coordinator"):
        Recorder(None, "boss")


def test_values_that_json_lacks(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    with Recorder(tmp_path, "cli") as recorder:
        recorder.emit("x", loss=Scalar(), path=tmp_path)
    assert lines(recorder.path)[1]["loss"] == 0.5
    assert lines(recorder.path)[1]["path"] == str(tmp_path)


def test_threads_never_mix_lines(tmp_path: Path) -> None:
    with Recorder(tmp_path, "agent") as recorder:
        threads = [
            threading.Thread(target=lambda k=k: [recorder.emit("x", k=k, i=i, pad="y" * 500) for i in range(200)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = lines(recorder.path)[1:]
    assert sorted((event["k"], event["i"]) for event in seen) == [(k, i) for k in range(4) for i in range(200)]


KILLED = """
import os, signal, sys
from pathlib import Path
from ridethrough.ledger.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), "worker")
for step in range(1, 501):
    recorder.emit("step", generation=0, rank=0, step=step, t0_ns=step, t1_ns=step + 1, parts=[])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sigkill_loses_nothing_that_was_emitted(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    (file,) = (tmp_path / "events").iterdir()
    assert [event["step"] for event in lines(file)[1:]] == list(range(1, 501))


FULL = """
import resource, signal, sys
from pathlib import Path
from ridethrough.ledger.recorder import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
recorder = Recorder(Path(sys.argv[1]), "worker")
resource.setrlimit(resource.RLIMIT_FSIZE, (recorder.path.stat().st_size + 100, resource.RLIM_INFINITY))
for i in range(5):
    recorder.emit("x", i=i, pad="y" * 60)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recorder.emit("x", i=5)
"""


def test_a_full_disk_disturbs_nobody_and_is_said(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("are being lost") == 1
    (file,) = (tmp_path / "events").iterdir()
    text = [line for line in file.read_text().splitlines() if line]
    good = []
    for line in text:
        try:
            good.append(json.loads(line))
        except ValueError:
            continue
    assert good[0]["kind"] == "header"
    assert good[-1]["i"] == 5
    assert [event for event in good if event["kind"] == "header"][-1]["num_dropped"] >= 3


def test_a_step_costs_less_than_a_fivehundredth_of_50_ms() -> None:
    import overhead

    assert (
        overhead.measure(3000)["cpu_us_per_step"] < 100
    )  # about 15 on a machine of 2024; CPU time, so load is no matter
