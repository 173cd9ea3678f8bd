"""The signals that ask a launch to end: the first one for a last save, another one at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.launch.config import LaunchConfig

PARENT_GONE = signal.SIGRTMAX - 5  # the kernel sends it when our parent ends, and perhaps once for each of its threads
_NOTICES = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}  # what schedulers send before they take a machine away


class StopSignals:
    """`post` takes the request, each time. All methods run in the main thread.

    SIGHUP stays ignored if it was (nohup). With `grace_left_s` a script that the machine can't talk to (one without
    `rt.run`) gets what is left of its time after the signal was passed on; `again` is set by the second signal.
    """

    def __init__(self, config: LaunchConfig, post: Callable[[m.StopRequested], None]) -> None:
        self._config, self._post = config, post
        self.first: signal.Signals | None = None
        self.again = asyncio.Event()
        self._deadline_s = 0.0

    def grace_left_s(self) -> float:
        """Seconds; 0 without a signal."""
        return max(0.0, self._deadline_s - time.monotonic())

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        taken = [
            signal.Signals(number)
            for number in self._config.signals
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)
        ]
        for sig in taken:
            loop.add_signal_handler(sig, self._on_signal, sig)
        loop.add_signal_handler(PARENT_GONE, self._on_parent_gone)
        try:
            yield
        finally:
            for sig in taken:
                loop.remove_signal_handler(sig)
            loop.remove_signal_handler(PARENT_GONE)

    def _on_parent_gone(self) -> None:
        if self.first is None:
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, sig: signal.Signals) -> None:
        if self.first is None:
            self.first = sig
            self._deadline_s = time.monotonic() + self._config.policy.stop_grace_s
            _say(f"ridethrough: {sig.name}: a last save, then the end (again: at once)")
        else:
            self.again.set()
            _say(f"ridethrough: {sig.name} again: the end")
        self._post(m.StopRequested(cause=sig.name, code=stop_code(sig), grace_s=self._config.policy.stop_grace_s))


def stop_code(sig: signal.Signals) -> int:
    """The exit code of a launch that this signal has ended."""
    return ExitCode.PREEMPTED if sig in _NOTICES else 128 + sig


def _say(line: str) -> None:
    """Nobody may be there to read it: a closed terminal is the reason for SIGHUP."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def lasting_output() -> None:
    """After the terminal has gone, what is printed must not raise: it goes nowhere instead."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
