"""The limits of the policy that a rank keeps by itself: flipped, each changes what happens."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from ridethrough.generation.policy import Policy
from ridethrough.restart import gate
from ridethrough.restart.generation import Place
from ridethrough.restart.groups import Groups


def test_a_plan_brings_the_policy_along() -> None:
    policy = Policy(interrupt_after_s=0.7, evict_on=("user", "nic"))
    fields = dict.fromkeys(Place.__dataclass_fields__, 1)
    assert Place.from_message({**fields, "policy": policy.changed()}).policy == policy


_INTERRUPTED = """
import socket, sys, time
from pathlib import Path
from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.restart.exceptions import LeaveGeneration
from ridethrough.restart.generation import Stage
from ridethrough.restart.groups import Groups
from ridethrough.restart.interrupt import Interrupter
from ridethrough.restart.link import Link
from ridethrough.restart.monitor import Monitor

agent = socket.socket(socket.AF_UNIX)  # takes the connection and says nothing
agent.bind("agent.sock")
agent.listen()
interrupter = Interrupter()
monitor = Monitor(Link("agent.sock", "w"), HeartbeatPage(Path("page"), create=True), interrupter)
monitor.start()

def interrupted(after_s, sleep_s):
    stage = Stage(1)
    monitor.watch(stage, Groups(0, 3.0), Policy(interrupt_after_s=after_s))
    try:
        interrupter.arm()
        monitor.cut(stage)
        for _ in range(int(100 * sleep_s)):
            time.sleep(0.01)
    except LeaveGeneration as error:
        return error.interrupted
    finally:
        interrupter.disarm()
        stage.left.set()
    return False

print(interrupted(0.0, 30.0), interrupted(1000.0, 0.5))
"""


def test_a_thread_is_interrupted_after_interrupt_after_s(tmp_path: Path) -> None:
    """In a process of its own: a monitor lives as long as its process, and ends it when the agent is gone."""
    command = [sys.executable, "-c", _INTERRUPTED]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize(("limit_s", "aborted"), [(0.05, False), (30.0, True)])
def test_nccls_abort_has_abort_limit_s(monkeypatch: pytest.MonkeyPatch, limit_s: float, aborted: bool) -> None:
    begun = threading.Event()
    backend = SimpleNamespace(abort=lambda: begun.wait(30.0))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=[group]))
    pretend_cuda(monkeypatch)
    groups = Groups(0, limit_s)
    if aborted:
        threading.Timer(0.2, begun.set).start()
    groups.cut()
    begun.set()
    assert groups.aborted is aborted


@pytest.mark.parametrize(("limit_s", "why"), [(0.05, "the GPU did not come to an end within 0.05 s"), (30.0, "")])
def test_the_gate_waits_for_the_gpu_for_gate_limit_s(monkeypatch: pytest.MonkeyPatch, limit_s: float, why: str) -> None:
    before = gate.baseline()
    pretend_cuda(monkeypatch)
    idle = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: idle.wait(30.0))
    if not why:
        threading.Timer(0.2, idle.set).start()
    assert gate.why_not(before, None, aborted=True, limit_s=limit_s) == why
    idle.set()


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that a GPU is in use; there need not be one."""
    said: dict[str, Any] = {"is_available": True, "is_initialized": True, "current_device": 0, "memory_allocated": 0}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
