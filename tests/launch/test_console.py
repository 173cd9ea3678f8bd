"""Live output: what is folded, what never is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ridethrough.launch.console import Console

CONNECTED = "[Gloo] Rank {0} is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
BROKEN = "[W1130 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=33): Connection reset by peer"


def shown(capsys: pytest.CaptureFixture[str], *lines: tuple[str, str]) -> list[str]:
    async def show() -> None:
        console = Console()
        for prefix, text in lines:
            console.show(prefix, text, is_error=False)
        console.tell()

    asyncio.run(show())
    told: Any = capsys.readouterr()
    return (told.out + told.err).splitlines()


def test_a_line_said_again_and_again_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [("[rank0] ", "loss is nan")] * 40 + [("[rank0] ", "step 2")] + [("[rank0] ", "loss is nan")]
    told = ["[rank0] loss is nan"] * 3 + ["[rank0] (the same line 37 times more)", "[rank0] step 2"]
    assert shown(capsys, *lines) == [*told, "[rank0] loss is nan"]


def test_a_new_process_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def show() -> None:
        console = Console()
        for _ in range(5):
            console.begin("[rank0] ")
            for _ in range(2):
                console.show("[rank0] ", "sum 2.0", is_error=False)
        console.tell()

    asyncio.run(show())
    assert capsys.readouterr().out.splitlines() == ["[rank0] sum 2.0"] * 10


def test_what_another_rank_says_is_no_repetition(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown(capsys, ("[rank0] ", "out of memory"), ("[rank1] ", "out of memory"))) == 2


def test_known_noise_is_shown_once_for_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [(f"[rank{rank}] ", CONNECTED.format(rank)) for _ in range(5) for rank in range(4)]
    first, count = shown(capsys, *lines)
    assert first == f"[rank0] {CONNECTED.format(0)}"
    assert count == f"ridethrough: 19 more like: {CONNECTED.format(0)}"


def test_a_stack_goes_with_the_noise_that_it_belongs_to(capsys: pytest.CaptureFixture[str]) -> None:
    stack = [("[rank1] ", "Exception raised from recvBytes at Utils.hpp:682"), ("[rank1] ", "frame #0: c10::Error")]
    told = shown(capsys, ("[rank0] ", BROKEN), ("[rank1] ", BROKEN), *stack, ("[rank1] ", "ValueError: lr=-1"), *stack)
    assert told == [
        f"[rank0] {BROKEN}",
        "[rank1] ValueError: lr=-1",
        *(prefix + text for prefix, text in stack),
        f"ridethrough: 1 more like: {BROKEN}",
    ]
