"""The keeper as a real process: superseding, dying, failing storage, full disks, and its own small size."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ridethrough.checkpoint as rc
from ridethrough.checkpoint import client, layout, wire
from ridethrough.checkpoint.arena import POOL
from ridethrough.generation.socket_folder import sweep_folders
from ridethrough.ledger.partition import read_events

HERE = Path(__file__).parent


@pytest.fixture
def own_keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """own_keeper(hook, **environment): this test's checkpointers get a keeper of their own with that file
    hook."""
    made: list[client.KeeperClient] = []
    monkeypatch.setattr(client, "_clients", {})

    def start(hook: str | None = None, **environment: str) -> client.KeeperClient:
        monkeypatch.setenv("PYTHONPATH", str(HERE))
        if hook:
            monkeypatch.setenv("RIDETHROUGH_FILE_HOOK", f"hooks:{hook}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "k"
        folder.mkdir(mode=0o700, exist_ok=True)
        made.append(client.client_for(folder / "keeper.sock", owned=True))
        made[-1].connect()
        return made[-1]

    yield start
    for one in made:
        for submission in one._pending.values():  # nothing is to be handed to a new keeper
            POOL.release(submission.arena.id, submission.serial)
        one._pending.clear()
        if one.process is not None:
            one.process.kill()
            one.process.wait()


def committed(root: Path) -> list[int]:
    return [a.step for a in layout.scan(root) if a.state == "committed"]


def test_slow_storage_supersedes_but_keeps_durable_saves_and_training_does_not_wait(
    job: Any, own_keeper: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = tmp_path / "run"
    keeper = own_keeper("slow", SLOW_S="0.6", GATE=str(gate), RIDETHROUGH_RUN_DIR=str(run))
    one = job(every=1, keep=50)
    one.checkpointer.load()
    tickets = {}
    for step in range(1, 13):
        one.train(step)
        tickets[step] = one.checkpointer.save(step, durable=True) if step == 5 else one.checkpointer.step(step)
        time.sleep(0.05)
    gate.touch()
    one.checkpointer.close(30)
    states = {step: ticket.state for step, ticket in tickets.items()}
    assert states[5] == states[12] == "committed", states
    figures = one.checkpointer.figures
    assert figures.superseded >= 4 and figures.superseded + figures.committed >= 12
    assert sorted(committed(tmp_path / "ckpt")) == [s for s, state in states.items() if state == "committed"]
    keeper.process.terminate()
    keeper.process.wait(20)
    weighed = [e for e in read_events(run) if e["kind"] == "host_memory"]
    most = max(e["bytes"] for e in weighed)
    assert len(one.bytes()) <= most <= figures.host_bytes + figures.saves * 2**16  # small values lie beside the arenas
    assert max(e["queued"] for e in weighed) >= 2 and max(e["queued_bytes"] for e in weighed) >= len(one.bytes())


def test_a_kill_in_the_middle_of_a_write_leaves_the_last_commit_in_place(
    job: Any, own_keeper: Any, tmp_path: Path, undisturbed: Any
) -> None:
    """Case B24: a save that is only queued moves nothing and prunes nothing."""
    gate = tmp_path / "gate"
    gate.touch()
    keeper = own_keeper("slow", SLOW_S="4", GATE=str(gate))
    one = job(keep=1)
    one.checkpointer.load()
    one.run(0, 4)
    one.checkpointer.save(4).committed(20)
    gate.unlink()
    one.run(4, 6)
    ticket = one.checkpointer.save(6)
    ticket.staged(5)
    time.sleep(0.3)
    keeper.process.send_signal(signal.SIGSTOP)  # nothing is written from here on; then gone for good
    assert committed(tmp_path / "ckpt") == [4]
    assert one.checkpointer.figures.committed == 1 and ticket.state == "staged"
    root = tmp_path / "copy"
    subprocess.run(["cp", "-r", tmp_path / "ckpt", root], check=True)
    client._clients.clear()
    again = job(root=root)
    assert again.checkpointer.load().step == 4
    assert again.bytes() == undisturbed(4)


@pytest.mark.parametrize(("operation", "name"), [("write", "__0_0"), ("create", "COMMIT"), ("unlink", "COMMIT")])
def test_a_killed_keeper_is_started_again_and_the_save_is_made(
    job: Any, own_keeper: Any, tmp_path: Path, undisturbed: Any, operation: str, name: str
) -> None:
    """Case B26, second half."""
    keeper = own_keeper("die_once", DIE_AT=operation, DIE_ON=name, DIED=str(tmp_path / "died"))
    one = job(keep=1)
    one.checkpointer.load()
    first = keeper.serial
    for step in (1, 2, 3):
        one.run(step - 1, step)
        ticket = one.checkpointer.save(step)
        assert ticket.committed(20)
    assert (tmp_path / "died").exists() and keeper.serial > first
    one.checkpointer.close(20)
    assert committed(tmp_path / "ckpt")[0] == 3
    again = job()
    assert again.checkpointer.load().step == 3
    assert again.bytes() == undisturbed(3)


def test_what_lands_while_a_killed_keeper_is_replaced_is_saved_too(
    job: Any, own_keeper: Any, tmp_path: Path, undisturbed: Any
) -> None:
    keeper = own_keeper("slow", SLOW_S="1", GATE=str(tmp_path / "gate"))
    one = job(keep=9)
    one.checkpointer.load()
    for step in (1, 3, 5):
        one.run(step - 1, step)
        one.checkpointer.save(step).staged(20)
        keeper.process.kill()  # in the middle of the write; its successor takes a while to start
        keeper.process.wait()
        one.train(step + 1)
        last = one.checkpointer.save(step + 1)
    one.checkpointer.close(30)
    assert last.state == "committed"
    assert committed(tmp_path / "ckpt") == [6, 5, 4, 3, 2, 1]
    assert one.bytes() == undisturbed(6)


@pytest.mark.parametrize(
    ("operation", "name", "number"),
    [("write", "__0_0.distcp", errno.ENOSPC), ("fsync", "__0_1", errno.EIO), ("create", ".metadata", errno.EDQUOT)],
)
def test_a_failed_write_reaches_the_trainer_with_file_and_rank_and_the_next_save_works(
    job: Any, own_keeper: Any, tmp_path: Path, operation: str, name: str, number: int
) -> None:
    """Case B26, first half."""
    failing = tmp_path / "failing"
    own_keeper("fail", FAIL_AT=operation, FAIL_ON=name, FAILING=str(failing), FAIL_ERRNO=str(number))
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    assert one.checkpointer.save(1).committed(20)
    failing.touch()
    one.run(1, 2)
    ticket = one.checkpointer.save(2)
    with pytest.raises(rc.CheckpointError, match=rf"step 2.*{name.replace('.', '.')}.*{os.strerror(number)}"):
        ticket.committed(5)
    assert committed(tmp_path / "ckpt") == [1]
    assert not list((tmp_path / "ckpt").glob("step-2.*")), "partial files are removed"
    one.train(3)
    with pytest.raises(rc.CheckpointError, match="rank 0" if "__0" in name else "step 2"):
        one.checkpointer.step(3)
    failing.unlink()
    assert one.checkpointer.save(3).committed(20)
    figures = one.checkpointer.figures
    assert (figures.failed, figures.committed) == (1, 2)
    one.checkpointer.close(5)


def test_on_error_warn_goes_on(job: Any, own_keeper: Any, tmp_path: Path) -> None:
    own_keeper("fail", FAIL_AT="create", FAIL_ON="step-1", FAILING="/", FAIL_ERRNO="28")
    one = job(on_error="warn", every=1)
    one.checkpointer.load()
    one.train(1)
    ticket = one.checkpointer.step(1)
    with pytest.raises(rc.CheckpointError):
        ticket.committed(10)
    one.train(2)
    with pytest.warns(UserWarning, match="save of step 1 failed on rank 0"):
        one.checkpointer.step(2)
    one.checkpointer.close(20)
    assert committed(tmp_path / "ckpt") == [2]


@pytest.mark.root
def test_a_full_disk_costs_only_the_save_that_did_not_fit(job: Any, tmp_path: Path) -> None:
    """Case B27, on a tmpfs of 4 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    root = tmp_path / "small"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        small = job(root=root, width=100)
        small.checkpointer.load()
        small.run(0, 1)
        small.checkpointer.save(1).committed(20)
        state = small.bytes()
        small.checkpointer.close(5)
        large = job(root=root, width=1000, allow_missing=["*"], allow_extra=["*"])
        large.run(0, 2)
        with pytest.raises(rc.CheckpointError, match=r"__0_0\.distcp: No space left.*\d+ bytes needed, \d+ free"):
            large.checkpointer.save(2).committed(20)
        assert not list(root.glob("step-2.*"))
        with pytest.raises(rc.StorageFull, match="save of step 2 failed on rank 0"):
            large.checkpointer.step(3)
        large.checkpointer.abandon()
        again = job(root=root, width=100)
        assert again.checkpointer.load().step == 1
        assert again.bytes() == state
        again.run(1, 2)
        assert again.checkpointer.save(2).committed(20)
        again.checkpointer.close(5)
    finally:
        subprocess.run(["umount", "-l", root], check=True)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_mounts_without_fsync_or_allocation_commit_all_the_same(
    job: Any, own_keeper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Case C50: rename, link and chmod are not used at all."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "def refuse(name):\n"
        f"    def call(*a, **k): raise OSError({number}, name)\n"
        "    setattr(os, name, call)\n"
        "names = 'rename replace fsync symlink link chmod fchmod posix_fallocate'\n"
        "for name in names.split(): refuse(name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE}")
    keeper = client.client_for(tmp_path / "q" / "keeper.sock", owned=True)
    keeper.connect()
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    assert one.checkpointer.save(1).committed(20)
    state = one.bytes()
    one.checkpointer.close(5)
    again = job()
    assert again.checkpointer.load().step == 1
    assert again.bytes() == state
    keeper.process.kill()
    keeper.process.wait()


def test_a_killed_keepers_folder_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that made it is gone in both cases."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    maker = subprocess.Popen(["true"])
    maker.wait()
    folder = tmp_path / f"ridethrough-{maker.pid}-x"
    keeper = client.KeeperClient(folder / "keeper.sock", owned=True)
    keeper.connect()
    assert keeper.process is not None
    try:
        sweep_folders()
        assert folder.exists()
    finally:
        keeper.process.kill()
        keeper.process.wait()
    sweep_folders()
    assert not folder.exists()


def test_forty_saves_leave_nothing_behind(job: Any, own_keeper: Any, tmp_path: Path) -> None:
    """Case B40. With one slot, so that all memory for snapshots is there from the first save on; and the state changes
    in place, since gradients and what an optimizer allocates come and go by more than a state."""
    keeper = own_keeper()
    one = job(width=1300, keep=2, slots=1)  # 20 MB of state
    one.checkpointer.load()
    one.train(0)
    me, it = psutil.Process(), psutil.Process(keeper.process.pid)

    def counts() -> list[int]:
        files = sum(1 for _ in (tmp_path / "ckpt").rglob("*"))
        return [it.num_fds(), it.num_threads(), me.num_fds(), me.num_threads(), files, len(me.children(recursive=True))]

    rss, seen = {}, {}
    for step in range(1, 41):
        one.checkpointer.fence()
        torch._foreach_add_([p.detach() for p in one.model.parameters()], 1.0)
        one.checkpointer.save(step).committed(30)
        if step in (5, 40):
            rss[step] = me.memory_info().rss + it.memory_info().rss
            seen[step] = counts()
    assert rss[40] - rss[5] <= len(one.bytes())
    deadline = time.monotonic() + 5  # a descriptor may still be on its way to being closed
    while any(now > then for now, then in zip(seen[40], seen[5], strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
        seen[40] = counts()
    assert all(now <= then for now, then in zip(seen[40], seen[5], strict=True)), seen
    one.checkpointer.close(20)


def test_the_keeper_is_light_private_and_ends_by_itself(own_keeper: Any, tmp_path: Path) -> None:
    keeper = own_keeper()
    process = psutil.Process(keeper.process.pid)
    assert process.nice() == 10 or os.nice(0) > 0
    assert process.memory_info().rss < 60e6
    assert (keeper.path.parent.stat().st_mode & 0o777, keeper.path.stat().st_mode & 0o777) == (0o700, 0o600)
    second = [sys.executable, "-m", "ridethrough.checkpoint.keeper", "--socket", str(keeper.path)]
    assert subprocess.run(second, timeout=20, check=False).returncode == 0  # one keeper per socket
    keeper._sock.shutdown(socket.SHUT_RDWR)
    assert keeper.process.wait(20) == 0
    assert not keeper.path.parent.exists()


def test_the_keeper_and_the_package_import_no_torch() -> None:
    code = "import sys, ridethrough.checkpoint, ridethrough.checkpoint.keeper; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_write_longer_than_the_grace_is_warned_of_once(
    job: Any, own_keeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 27. The keeper has 0.1 s where it is told to stop, storage takes 0.4 s for a state."""
    spawn = subprocess.Popen
    monkeypatch.setattr(client.subprocess, "Popen", lambda argv, **more: spawn([*argv, "--grace", "0.1"], **more))
    own_keeper("slow", SLOW_S="0.4")
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    with pytest.warns(
        UserWarning, match=r"took 0\.\d+ s to write, and a keeper that is told to stop has 0\.1 s"
    ) as told:
        for step in (1, 2):
            one.checkpointer.save(step).committed(20)
    assert len(told) == 1
    one.checkpointer.close(20)


def test_messages_carry_descriptors_and_refuse_nonsense() -> None:
    left, right = socket.socketpair()
    fd = os.memfd_create("x")
    os.write(fd, b"hello")

    def send() -> None:
        wire.send_message(left, {"op": "a", "long": "y" * 300000}, [fd, fd])
        wire.send_message(left, {"op": "b"})

    sender = threading.Thread(target=send)
    sender.start()
    message, fds = wire.receive_message(right) or ({}, [])
    assert len(message["long"]) == 300000 and len(fds) == 2
    assert os.pread(fds[1], 5, 0) == b"hello"
    assert wire.receive_message(right) == ({"op": "b"}, [])
    sender.join(5)
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="exceeds"):
        wire.receive_message(right)
    left.close()
    for each in (*fds, fd):
        os.close(each)


def test_a_stuck_file_system_is_a_timeout_and_never_a_hang(job: Any, own_keeper: Any, tmp_path: Path) -> None:
    own_keeper("slow", SLOW_S="60")
    one = job()
    one.checkpointer.load()
    one.run(0, 1)
    ticket = one.checkpointer.save(1)
    with pytest.raises(rc.CheckpointTimeout, match=r"step 1 not committed within 0\.2 s"):
        ticket.committed(0.2)
    began = time.monotonic()
    with pytest.raises(rc.CheckpointTimeout):
        one.checkpointer.close(0.3)
    assert time.monotonic() - began < 10
