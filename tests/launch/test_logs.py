"""What is kept of a worker's output."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console
from ridethrough.launch.logs import WorkerLog

BAR = b"\r 50%|#####     |" * 20_000


def test_a_line_that_never_ends_is_written_as_it_comes(tmp_path: Path) -> None:
    async def write() -> int:
        log = WorkerLog(LaunchConfig(command=[], echo=False), tmp_path, 0, 0, Console())
        log.begin(0)
        (out_read, out), (err_read, err) = os.pipe(), os.pipe()
        log.attach(out_read, err_read)
        for start in range(0, len(BAR), 1 << 15):
            os.write(out, BAR[start : start + (1 << 15)])
            log.catch_up()
        so_far = (tmp_path / "a0000-rank0.log").stat().st_size
        os.close(out)
        os.close(err)
        await log.drain(10.0)
        return so_far

    assert asyncio.run(write()) > len(BAR) - (1 << 16)
    assert (tmp_path / "a0000-rank0.log").read_bytes().replace(b"\n", b"") == BAR
