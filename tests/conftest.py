"""After any test, passed or failed: no process of it is left, and if it had real ranks, the ledger of each run that it
left adds up to the wall, to the nanosecond.

The keeper of this very process may stay: it serves every Checkpointer here and ends with pytest.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridethrough.ledger.reading import LedgerError
from ridethrough.ledger.summary import read_run

_LIMIT_S = 20.0


def _children() -> dict[int, str]:
    """Command lines of this process's children that still run, by PID."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended; its children are another one's now
            continue
        for pid in pids:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    if "ridethrough.checkpoint.keeper" not in command:
                        found[int(pid)] = command
            except OSError:  # gone meanwhile
                pass
    return found


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, with a shorter name: jobs have their TMPDIR in it, and a socket's path ends at 107 bytes."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:12])


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    before = _children().keys()
    yield
    end = time.monotonic() + _LIMIT_S
    while left := {pid: command for pid, command in _children().items() if pid not in before}:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"processes are left: {left}")
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def every_run_adds_up(request: pytest.FixtureRequest) -> Iterator[None]:
    ranks = request.node.get_closest_marker("ranks") is not None and "tmp_path" in request.fixturenames
    folder = request.getfixturevalue("tmp_path") if ranks else None
    yield
    for description in folder.rglob("run.json") if folder is not None else ():
        try:
            read_run(description.parent)  # raises if a nanosecond of a slot is missing, or there twice
        except LedgerError as error:
            if "no events" not in str(error) and "no event names a rank" not in str(error):
                raise
