"""A rank missing in a collective on gloo: the peers wait in it, the guilty rank waits outside, and no process dies."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ridethrough.faults.schedule import by_hand
from ridethrough.faults.shot import SCHEDULE_VARIABLE

WORKER = Path(__file__).with_name("fsdp_worker.py")
GUILTY = 2


def lines_until(ranks: list[subprocess.Popen[str]], count: int, limit_s: float) -> list[dict[str, Any]]:
    """The next `count` lines of all ranks, in order of arrival."""
    selector = selectors.DefaultSelector()
    for process in ranks:
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, process)
    found: list[dict[str, Any]] = []
    end = time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end:
        for key, _ in selector.select(timeout=0.5):
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if line:
                found.append(json.loads(line))
            else:
                selector.unregister(key.fileobj)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "phase", "stuck_step"),
    [
        ("ddp", "backward", 4),
        pytest.param("fsdp2", "backward", 3, marks=pytest.mark.campaign),
        pytest.param("fsdp2", "forward", 3, marks=pytest.mark.campaign),
        pytest.param("fsdp2", "optimizer", 4, marks=pytest.mark.campaign),
    ],
)
def test_peers_wait_guilty_is_freed_by_a_signal_and_nobody_dies(
    tmp_path: Path, model: str, phase: str, stuck_step: int
) -> None:
    by_hand([f"hang_skip_collective:{GUILTY}:3:{phase}"], steps=8, world_size=4).save(tmp_path / "faults.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ, WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    environment[SCHEDULE_VARIABLE] = str(tmp_path / "faults.json")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path), model, "4"],
            env=dict(environment, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        injected = lines_until(ranks, 1, 60)
        assert [(line["event"], line["rank"], line["step"]) for line in injected] == [("fault_injected", GUILTY, 3)]
        time.sleep(1.0)
        assert [process.poll() for process in ranks] == [None] * 4
        os.kill(ranks[GUILTY].pid, signal.SIGUSR1)
        left = sorted(lines_until(ranks, 4, 40), key=lambda line: line["rank"])
        # The first peer to reach its timeout closes its sockets, which may let the next one out before its own.
        assert [line["left"] == "freed" for line in left] == [False, False, True, False]
        assert {line["left"] for line in left} - {"error"} == {"timeout", "freed"}
        assert {line["step"] for line in left} == {stuck_step}
        assert left[GUILTY]["pid"] == ranks[GUILTY].pid
        assert [process.poll() for process in ranks] == [None] * 4
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait(10)
