"""What is kept of a worker's output."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console
from ridethrough.launch.logs import WorkerLog


def kept(folder: Path, *pieces: bytes) -> list[bytes]:
    """What the file holds after each of the pieces, and at the end."""

    async def write() -> list[bytes]:
        log = WorkerLog(LaunchConfig(command=[], echo=False), folder, 0, 0, Console())
        log.begin(0)
        (out_read, out), (err_read, err) = os.pipe(), os.pipe()
        log.attach(out_read, err_read)
        found = []
        for piece in pieces:
            os.write(out, piece)
            log.catch_up()
            found.append(path.read_bytes())
        os.close(out)
        os.close(err)
        await log.drain(10.0)
        return [*found, path.read_bytes()]

    path = folder / "a0000-rank0.log"
    return asyncio.run(write())


def test_a_line_that_never_ends_is_written_as_it_comes(tmp_path: Path) -> None:
    *_, so_far, whole = kept(tmp_path, *[b"x" * (1 << 15)] * 5)
    assert len(so_far) > 4 << 15
    assert whole.replace(b"\n", b"") == b"x" * (5 << 15)


def test_of_a_progress_bar_a_state_is_kept_now_and_then_and_the_last(tmp_path: Path) -> None:
    bar = [b"\r %3d%%|" % percent for percent in range(101)]
    first, *_, whole = kept(tmp_path, *bar, b"\n", b"done\r", b"\n")
    assert first == b"   0%|\n"
    assert whole == b"   0%|\n 100%|\ndone\n"


def test_a_return_may_come_behind_each_state(tmp_path: Path) -> None:
    assert kept(tmp_path, b"1 of 2\r", b"2 of 2\r")[-1] == b"1 of 2\n2 of 2\n"
