"""Whose processes are ended with a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from ridethrough.launch import linux


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_of_another_job_with_the_same_name_stays(sleepers: list[subprocess.Popen[bytes]]) -> None:
    """Two jobs on one machine each have a worker w0-1: one's loaders were killed with the other's worker."""
    jobs = [f"RIDETHROUGH_JOB={uuid.uuid4().hex}" for _ in range(2)]
    worker = "RIDETHROUGH_WORKER=w0-1"
    for job in jobs:
        env = {**os.environ, **dict(word.split("=") for word in (job, worker))}
        sleepers.append(subprocess.Popen(["sleep", "600"], env=env, start_new_session=True))
    first, second = sleepers
    assert linux.kill_tree(-1, jobs[0], worker) == {first.pid}
    assert first.wait(10) == -signal.SIGKILL
    assert second.poll() is None
