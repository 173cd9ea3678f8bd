"""Raises `LeaveGeneration` in the main thread, at a place where that does no harm.

A signal's handler runs in the main thread between two bytecodes, sees the interrupted frame, and wakes the thread from
a lock or a sleep. So it can look first: in the middle of an import, a compilation, a lock or our own code it returns
without raising, and the monitor asks again a little later.

A signal that comes while C code runs is handled at the next entry into a Python function. In a tight loop around a
context manager of torch that is nearly always inside the manager, so asking again would hardly ever help. Then the
frames below are traced instead, and the first jump back in one of their loops is the place: it never lies between a
context manager's block and its exit.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from ridethrough.restart.exceptions import LeaveGeneration

LEAVE_SIGNAL = signal.SIGRTMAX - 3
_AGAIN_S = 0.25
_BACKWARD = {code for name, code in dis.opmap.items() if "JUMP_BACKWARD" in name or name == "JUMP_ABSOLUTE"}
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
        if sys.gettrace() is _no_trace:
            sys.settrace(None)
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
            self._wait_for_a_loop(frame)
            return
        self._raised_at = time.monotonic()
        raise LeaveGeneration("a fault ended this generation", interrupted=True)

    def _wait_for_a_loop(self, frame: FrameType | None) -> None:
        if sys.gettrace() is not None:
            return  # a debugger, or ourselves
        sys.settrace(_no_trace)
        while frame is not None:
            if not any(part in frame.f_code.co_filename for part in (*_NOT_IN_FILES, *_NOT_INNERMOST_IN)):
                frame.f_trace, frame.f_trace_opcodes = self._trace, True
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not (self._armed and self._wanted):
            sys.settrace(None)
            return None
        at_jump = event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _BACKWARD
        if at_jump and not self._depth and _harmless(frame):
            sys.settrace(None)
            self._raised_at = time.monotonic()
            raise LeaveGeneration("a fault ended this generation", interrupted=True)
        return self._trace


def _no_trace(frame: FrameType, event: str, arg: Any) -> None:
    """New frames are not traced."""


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
