"""What is left behind is removed by the next one, and nothing of a living one, whose process id may say nothing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from ridethrough.generation.socket_folder import sweep_folders


def test_only_a_folder_that_nobody_holds_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead, elsewhere, ours = (
        tmp_path / f"ridethrough-{pid}-{n}" for n, pid in enumerate([gone.pid] * 2 + [os.getpid()])
    )
    for folder in (dead, elsewhere, ours):
        folder.mkdir()
    held = os.open(elsewhere, os.O_RDONLY)  # as an agent in another PID namespace
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        sweep_folders()
        assert sorted(tmp_path.iterdir()) == sorted([elsewhere, ours])
    finally:
        os.close(held)
    sweep_folders()
    assert list(tmp_path.iterdir()) == [ours]
