"""An interrupt lands where it does no harm: tight loops of what async exceptions are known to break."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridethrough.restart import gate
from ridethrough.restart.exceptions import LeaveGeneration, classify, fatality, is_cut_collective
from ridethrough.restart.generation import Stage
from ridethrough.restart.interrupt import Interrupter
from ridethrough.restart.sockets import connections, event_loops, gloo_loops, shut_down, tcp_sockets
from ridethrough.restart.thread_state import difference, modes

SHOTS = 60


def shoot(work: Callable[[], None], interrupter: Interrupter) -> int:
    """Runs `work` for ever until an interrupt ends it, many times; returns how many interrupts came through."""
    came = 0
    for shot in range(SHOTS):
        interrupter.arm()
        end = threading.Event()

        def fire(delay_s: float = 0.002 + 0.0003 * (shot % 7), end: threading.Event = end) -> None:
            while not end.wait(delay_s):
                interrupter.fire()

        thread = threading.Thread(target=fire)
        thread.start()
        limit = time.monotonic() + 5
        try:
            while time.monotonic() < limit:
                work()
        except LeaveGeneration as leave:
            came += leave.interrupted
        finally:
            interrupter.disarm()
            end.set()
            thread.join()
    return came


def test_autocast_and_grad_modes_are_never_left_switched() -> None:
    before = modes()
    x = torch.ones(4)
    wrong = 0

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            x + x

    interrupter = Interrupter()
    for _ in range(3):
        assert shoot(work, interrupter) == SHOTS
        wrong += bool(difference(before, modes()))
    assert wrong == 0


def test_no_logging_lock_is_left_held() -> None:
    logger = logging.getLogger("test-interrupt")
    logger.propagate = False
    handler = logging.NullHandler()
    handler.handle = logging.StreamHandler(open("/dev/null", "w")).handle  # type: ignore[method-assign]  # noqa: SIM115
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    assert shoot(lambda: logger.info("x"), Interrupter()) == SHOTS
    free: list[bool] = []

    def try_lock() -> None:
        lock: Any = logging._lock  # type: ignore[attr-defined]
        free.append(lock.acquire(timeout=1.0))
        lock.release()

    thread = threading.Thread(target=try_lock)
    thread.start()
    thread.join()
    assert free == [True]


def test_a_lock_and_a_sleep_are_left_at_once() -> None:
    interrupter = Interrupter()
    lock = threading.Lock()
    lock.acquire()
    for work in (lambda: time.sleep(60), lock.acquire):
        interrupter.arm()
        timer = threading.Timer(0.1, interrupter.fire)
        timer.start()
        with pytest.raises(LeaveGeneration):
            work()
        interrupter.disarm()


def test_nothing_is_raised_in_a_held_section_or_after_disarming() -> None:
    interrupter = Interrupter()
    interrupter.arm()
    interrupter.hold()
    interrupter.fire()
    time.sleep(0.05)
    interrupter.let_go()
    interrupter.disarm()
    interrupter.fire()
    time.sleep(0.05)


def test_the_gate_names_what_is_not_as_it_was() -> None:
    before = gate.baseline()
    assert gate.why_not(before, None, aborted=True, limit_s=1.0) == ""
    assert gate.why_not(before, ValueError("x"), aborted=True, limit_s=1.0) == ""
    assert "abort" in gate.why_not(before, None, aborted=False, limit_s=1.0)
    assert "CUDA failed" in gate.why_not(
        before, RuntimeError("CUDA error: device-side assert"), aborted=True, limit_s=1.0
    )
    with torch.inference_mode():
        assert "inference is True (was False)" in gate.why_not(before, None, aborted=True, limit_s=1.0)
    with torch.device("meta"):
        assert "default device is meta (was cpu)" in gate.why_not(before, None, aborted=True, limit_s=1.0)


def test_a_foreign_communicator_closes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
    assert "mpi4py.MPI holds connections" in gate.why_not(gate.baseline(), None, aborted=True, limit_s=1.0)


def test_classes_and_fatality() -> None:
    cut = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert is_cut_collective(cut) and classify(cut) == "collective"
    assert classify(RuntimeError("CUDA error: an illegal memory access was encountered")) == "gpu"
    assert classify(torch.OutOfMemoryError("CUDA out of memory")) == "exception"
    assert fatality(ImportError("x"), first=False) == "policy"
    assert fatality(ValueError("x"), first=True) == "before_first_step"
    assert fatality(ValueError("x"), first=False) == ""
    assert fatality(cut, first=True) == ""


def test_only_gloos_own_connections_are_found_and_shut() -> None:
    """Two groups in two threads of this process, and a tracker that opens a socket meanwhile."""
    server = socket.create_server(("127.0.0.1", 0))
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    clients = [store, dist.TCPStore("127.0.0.1", store.port, 2, False)]
    before = event_loops()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("x", clients[rank]), rank, 2)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    tracker = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    for thread in threads:
        thread.join()
    loops = gloo_loops(before)
    found = connections(loops)
    assert len(loops) == 2 and len(found) == 2
    table = tcp_sockets()
    assert {table[s.inode].remote_port for s in found}.isdisjoint({store.port, server.getsockname()[1]})
    assert shut_down(found) >= 1  # both ends are in this process
    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer|Broken pipe"):
        groups[0].allreduce([torch.ones(1)]).wait()
    tracker.sendall(b"x")
    assert other.recv(1) == b"x"
    assert store.check(["nothing"]) is False
    for sock in (server, tracker, other):
        sock.close()


def test_a_planned_stop_agrees_on_a_step_and_a_fault_breaks_the_wait() -> None:
    stage = Stage(1)
    assert stage.begin(1)
    assert stage.ask() == 1
    threading.Timer(0.05, stage.stop_at, (3,)).start()
    assert [stage.begin(s) for s in (2, 3)] == [True, True]
    assert not stage.begin(4)
    held = Stage(2)
    held.begin(1)
    held.ask()
    threading.Timer(0.05, held.end).start()
    with pytest.raises(LeaveGeneration):
        held.begin(2)
