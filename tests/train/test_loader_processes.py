"""A rank that is killed takes its loader's processes with it, and they hold none of its connections meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.ranks

_RANK = """
import os, socket, sys, time
from ridethrough.train.corpus import load_corpus
from ridethrough.train.data import StepLoader

listener = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(listener.getsockname())
peer, _ = listener.accept()
loader = StepLoader(load_corpus(None).train, seq_len=16, batch_size=2, rank=0, world_size=1, seed=0, num_workers=2)
next(loader), next(loader)  # one of each worker
print(*(os.fstat(s.fileno()).st_ino for s in (listener, connection, peer)), flush=True)
time.sleep(60)
"""


def sockets_of(pid: int) -> set[str]:
    return {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd).startswith("socket:")}


def test_loader_processes_let_go_of_connections_and_end_with_their_rank() -> None:
    rank = subprocess.Popen([sys.executable, "-c", _RANK], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        held = {f"socket:[{inode}]" for inode in rank.stdout.readline().split()}
        workers = psutil.Process(rank.pid).children()
        assert (len(held), len(workers)) == (3, 2)
        assert held <= sockets_of(rank.pid)
        assert [held & sockets_of(worker.pid) for worker in workers] == [set(), set()]
    finally:
        rank.kill()
        rank.wait()
    deadline = time.monotonic() + 30
    while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE] == []
