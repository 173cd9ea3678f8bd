"""Raises `LeaveGeneration` in the main thread, at a place where that does no harm.

A signal's handler runs in the main thread between two bytecodes, sees the interrupted frame, and wakes the thread from
a lock or a sleep. So it can look first: in the middle of an import, a compilation, a lock or our own code it returns
without raising, and the monitor asks again a little later.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from ridethrough.restart.exceptions import LeaveGeneration

LEAVE_SIGNAL = signal.SIGRTMAX - 3
_AGAIN_S = 0.25
_NOT_IN_FILES = (
    "<frozen importlib",
    "/importlib/",
    "/logging/__init__.py",
    "/torch/_dynamo/",
    "/torch/_inductor/",
    "/ridethrough/restart/",
    "/ridethrough/checkpoint/",
    "/ridethrough/ledger/",
)
_NOT_INNERMOST_IN = (
    "/threading.py",
    "/torch/autograd/grad_mode.py",
    "/torch/amp/autocast_mode.py",
    "/torch/utils/_contextlib.py",
)
_WRAPPER = ("/torch/_dynamo/eval_frame.py", "_fn")
# Functions of ours that call the user's code. Below it they are harmless, but not where they are at work themselves.
_CALLERS = frozenset(
    {"run", "call", "loop", "_generation", "_call", "notify", "__enter__", "steps", "_begin_step", "_save"}
)


class Interrupter:
    """Armed while the training function runs. `arm`, `disarm` in the main thread; `fire` in the monitor thread."""

    def __init__(self) -> None:
        self._armed = False
        self._wanted = False
        self._raised_at = 0.0
        self._main = threading.main_thread()
        self._depth = 0
        self.usable = threading.current_thread() is self._main
        if self.usable:
            signal.signal(LEAVE_SIGNAL, self._handle)

    def arm(self) -> None:
        self._depth = 0
        self._wanted = False
        self._raised_at = 0.0
        self._armed = True

    def disarm(self) -> None:
        self._armed = False
        self._wanted = False

    def hold(self) -> None:
        """`run.uninterrupted()` begins: nothing is raised until `let_go`."""
        self._depth += 1

    def let_go(self) -> None:
        self._depth -= 1

    def fire(self) -> None:
        """Asks the main thread to leave; harmless if it has left."""
        if self.usable and self._armed:
            self._wanted = True
            signal.pthread_kill(self._main.ident or 0, LEAVE_SIGNAL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not (self._armed and self._wanted) or self._depth or time.monotonic() - self._raised_at < _AGAIN_S:
            return
        if not _harmless(frame):
            return
        self._raised_at = time.monotonic()
        raise LeaveGeneration("a fault ended this generation", interrupted=True)


def _harmless(frame: FrameType | None) -> bool:
    """Whether nothing on the stack would be left half done."""
    innermost = True
    while frame is not None:
        name = frame.f_code.co_filename
        if innermost and any(part in name for part in _NOT_INNERMOST_IN):
            return False
        if not innermost and name.endswith(_WRAPPER[0]) and frame.f_code.co_name == _WRAPPER[1]:
            frame = frame.f_back
            continue
        calls_user = not innermost and "/ridethrough/restart/" in name and frame.f_code.co_name in _CALLERS
        if not calls_user and any(part in name for part in _NOT_IN_FILES):
            return False
        frame = frame.f_back
        innermost = False
    return True
