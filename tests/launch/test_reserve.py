"""Starting workers through spares, without a job around it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ridethrough.launch import linux
from ridethrough.launch.forker import Forker
from ridethrough.launch.reserve import Reserve

MARK = "RIDETHROUGH_JOB=test-reserve"
Start = Callable[[dict[str, Any]], Awaitable[tuple[int, str]]]


def with_reserve(tmp_path: Path, num_spares: int, use: Callable[[Reserve, Start], Awaitable[None]]) -> None:
    """Runs `use(reserve, start)`; `start(env)` runs a program that prints MY_WORDS and gives its pid and its output."""
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.environ['MY_WORDS'][-9:], os.getpid(), flush=True)\n")

    async def everything() -> None:
        env = {**os.environ, **dict([MARK.split("=")])}
        forker = Forker(job_mark=MARK, folder=str(tmp_path / "none"), preload=[], env=env)
        reserve = Reserve(forker, num_spares, [], env, lambda *args, **fields: None)

        async def start(more: dict[str, str]) -> tuple[int, str]:
            out, ours = os.pipe()
            assignment = {"command": [str(program)], "env": {**env, **more}, "cwd": str(tmp_path)}
            pid = await reserve.start_worker(assignment, ours, ours)
            os.close(ours)
            with open(out) as file:
                text = await asyncio.to_thread(file.read)
            os.waitpid(pid, 0)
            return pid, text

        forker.start()
        filling = asyncio.ensure_future(reserve.loop())
        try:
            assert await forker.ready(), forker.note
            await use(reserve, start)
        finally:
            filling.cancel()
            reserve.stop()
            forker.stop()
            linux.kill_tree(-1, MARK)

    linux.become_subreaper()
    asyncio.run(everything())


@pytest.mark.ranks
@pytest.mark.campaign
def test_each_assignment_runs_in_one_process_with_its_own_environment(tmp_path: Path) -> None:
    """A spare that had begun before the agent looked again was taken for dead, and the program was run twice."""

    async def use(reserve: Reserve, start: Start) -> None:
        for number in range(20):
            while number % 2 and not reserve.pids:
                await asyncio.sleep(0.05)
            spares = reserve.pids
            pid, text = await start({"MY_WORDS": f"number {number:2}"})
            assert text == f"number {number:2} {pid}\n"
            assert not spares or pid in spares

    with_reserve(tmp_path, 1, use)


@pytest.mark.ranks
def test_an_environment_of_a_megabyte_arrives(tmp_path: Path) -> None:
    async def use(reserve: Reserve, start: Start) -> None:
        pids = {}
        for number in range(3):
            pid, pids[pid] = await start({"MY_WORDS": "x" * (1 << 20) + f" number {number}"})
        assert list(pids.values()) == [f" number {number} {pid}\n" for number, pid in enumerate(pids)]

    with_reserve(tmp_path, 0, use)


@pytest.mark.ranks
@pytest.mark.timeout(90)
def test_a_zygote_that_dies_again_and_again_is_done_without(tmp_path: Path) -> None:
    async def use(reserve: Reserve, start: Start) -> None:
        forker = reserve._forker
        for _ in range(3):
            os.kill(forker.pid, 9)
            before = forker.pid
            while forker.pid == before and await forker.ready():
                await asyncio.sleep(0.05)
        with pytest.raises(OSError, match="the zygote died"):
            await start({"MY_WORDS": "never"})

    with_reserve(tmp_path, 0, use)
