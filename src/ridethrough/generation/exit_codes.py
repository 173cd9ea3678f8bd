"""The exit codes of `run`, `demo` and `train`, in one table: for the code, the command line and the documentation."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """What a job's exit status says to whoever started it. A job ended by signal n exits with 128 + n."""

    DONE = 0
    USAGE = 2
    RESTARTS_EXHAUSTED = 80
    NO_PROGRESS = 81
    PREEMPTED = 82
    FATAL = 83
    PROOF_FAILED = 84


REPLACE_ME = 71
"""A worker's own: it left the generation and wants a new process in its place, since it is not as it was before."""


@dataclass(frozen=True)
class ExitCodeRow:
    """`code` as people write it ("128 + n" for signals); `retry` is the advice to an orchestrator."""

    code: str
    name: str
    meaning: str
    retry: str


EXIT_CODES = (
    ExitCodeRow("0", "done", "done", "-"),
    ExitCodeRow("2", "usage", "bad usage, before any worker starts", "no"),
    ExitCodeRow("80", "restarts_exhausted", "restarts exhausted", "yes, on another node"),
    ExitCodeRow("81", "no_progress", "no progress", "no"),
    ExitCodeRow("82", "preempted", "preempted; what there was to save is saved", "yes"),
    ExitCodeRow("83", "fatal", "fatal by policy: do not retry", "no"),
    ExitCodeRow("84", "proof_failed", "proof failed (demo)", "no"),
    ExitCodeRow("128 + n", "signal", "ended by signal n", "yes"),
)
"""Every code with its meaning. With `--max-restarts 0` a worker's own code, or 128 + n, is passed on instead."""


def describe(code: int) -> str:
    """One clause for an exit code, also for a worker's own: "no progress", "ended by SIGKILL", "exit code 17"."""
    for row in EXIT_CODES:
        if row.code == str(code):
            return row.meaning
    if code > 128:
        try:
            return f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"
