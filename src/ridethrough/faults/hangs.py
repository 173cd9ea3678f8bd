"""Ways to hang. All but the native ones end when a signal handler raises in the main thread.

Each has a limit of an hour, after which it raises InjectedFault: a hang that nobody saw must not hold a machine.
The native dead-locks have none; only SIGKILL ends them, as with the real thing.
"""

from __future__ import annotations

import ctypes
import threading
import time

from ridethrough.faults import missing_collective
from ridethrough.faults.shot import InjectedFault, Shot

LIMIT_S = 3600.0


def sleep_s(seconds: float) -> None:
    """Sleep; a signal handler that raises ends it."""
    time.sleep(seconds)


def loop(shot: Shot) -> None:
    """An endless Python loop: bytecode runs, a heartbeat thread gets the GIL, no step is ever done."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        pass
    raise InjectedFault(f"injected {shot.fault}: nobody ended the loop within {LIMIT_S:.0f} s")


def lock(shot: Shot) -> None:
    """Wait for a lock that its own thread holds."""
    wait_for_ever(f"injected {shot.fault}: nobody ended the wait for the lock")


def skip_collective(shot: Shot) -> None:
    """Leave out the next collective that this rank's Python issues; see `missing_collective`."""
    armed_at = shot.step

    def wait(name: str) -> None:
        wait_for_ever(f"injected {shot.fault}: nobody ended the wait for the collective {name} that was left out")

    def fallback(phase: str, step: int) -> bool:
        if missing_collective.is_armed() and step > armed_at:
            missing_collective.disarm()
            wait("of the next step")
        return not missing_collective.is_armed()

    if missing_collective.arm(wait):
        shot.follow(fallback)
    else:
        wait("of a process group that does not exist yet")


def native_gil_free(shot: Shot) -> None:
    """Dead-lock inside libc, GIL released: other Python threads run, signals' Python handlers never do."""
    _deadlock(ctypes.CDLL(None))


def native_gil_held(shot: Shot) -> None:
    """Dead-lock inside libc while holding the GIL: no Python thread of this process runs again."""
    _deadlock(ctypes.PyDLL(None))


def wait_for_ever(what: str) -> None:
    """Wait for a lock that nobody frees: the acquire runs signal handlers and passes on what they raise."""
    never = threading.Lock()
    never.acquire()
    if not never.acquire(timeout=LIMIT_S):
        raise InjectedFault(f"{what} within {LIMIT_S:.0f} s")


def _deadlock(libc: ctypes.CDLL) -> None:
    # Zeros are PTHREAD_MUTEX_INITIALIZER of the normal type, whose second lock by the same thread never returns;
    # unlike sleep or sem_wait it is not ended by a signal. 64 bytes cover the struct on x86-64 (40) and arm64 (48).
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
