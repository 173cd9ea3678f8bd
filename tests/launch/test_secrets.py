"""Who is heard by an agent, and what its workers do not get to know."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from ridethrough.generation import messages as m
from ridethrough.generation.wire import Decoder, encode
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.environment import worker_environment
from ridethrough.launch.keeper import KeeperProcess
from ridethrough.launch.worker_link import WorkerLink
from ridethrough.ledger.rundir import RunDir


def answer(folder: Path, hello: dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent says to a worker that introduces itself so, before it closes the connection."""

    async def ask() -> bytes:
        nothing: Any = None
        link = WorkerLink("n", {}, nothing, nothing, nothing)
        await link.open(folder / "agent.sock")
        reader, writer = await asyncio.open_unix_connection(folder / "agent.sock")
        writer.write(encode(hello))
        try:
            return await asyncio.wait_for(reader.read(), 30.0)
        except ConnectionResetError:  # closed with the hello unread
            return b""
        finally:
            writer.close()
            link.close()

    return Decoder().feed(asyncio.run(ask()))


def test_a_worker_of_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    (said,) = answer(tmp_path, {"t": "hello", "worker": "w", "protocol": 99})
    assert said["t"] == "refused"
    assert said["why"].startswith(f"the worker speaks protocol 99, its agent {m.PROTOCOL}")


def test_a_process_of_another_user_is_not_even_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert answer(tmp_path, {"t": "hello", "worker": "w", "protocol": 99}) == []


def test_the_jobs_token_is_not_in_a_workers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDETHROUGH_TOKEN", "secret")
    monkeypatch.setenv("RIDETHROUGH_TOKEN_FILE", "/where/it/is")
    monkeypatch.setenv("MY_TOKEN", "the user's own")
    config = LaunchConfig(command=["x"], token="secret")
    env = worker_environment(config, RunDir(tmp_path), tmp_path, "job", "127.0.0.1")
    assert {name for name in env if "TOKEN" in name} == {"MY_TOKEN"}
    assert "secret" not in env.values()


def test_the_keeper_gets_the_token_by_a_pipe_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDETHROUGH_TOKEN", "67f1c9")

    async def environment() -> bytes:
        path = tmp_path / "keeper.sock"
        keeper = KeeperProcess(path, RunDir(tmp_path), grace_s=5.0, env={}, address="127.0.0.1", token="67f1c9")
        keeper.start()
        try:
            while not path.exists():  # the test's time limit is the guard
                await asyncio.sleep(0.02)
            return Path(f"/proc/{keeper.pid}/environ").read_bytes()
        finally:
            await keeper.stop()

    assert b"67f1c9" not in asyncio.run(environment())
