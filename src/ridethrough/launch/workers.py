"""One worker process as its agent sees it: started, connected, stamped, ended."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ridethrough.generation.faults import FaultReport
from ridethrough.generation.membership import WorkerState
from ridethrough.health.heartbeat import HeartbeatPage, Reading
from ridethrough.launch.logs import WorkerLog
from ridethrough.ledger.schema import FaultClass

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")


@dataclass
class WorkerProcess:
    """`gone` is set when the process has been waited for and its tree has been ended. `hung` and `starved` say why the
    agent ended it, `early` is the report of a death that was seen before the process could be waited for."""

    id: str
    rank: int
    local_rank: int
    page: HeartbeatPage
    log: WorkerLog
    pid: int = 0
    pidfd: int = -1
    generation: int = 0
    writer: asyncio.StreamWriter | None = None
    released: bool = False
    state: WorkerState = "starting"
    kill_reason: str = ""
    hung: str = ""
    starved: str = ""
    early: FaultReport | None = None
    told_fatal: str = ""
    started_ns: int = field(default_factory=time.monotonic_ns)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def reading(self) -> Reading:
        return self.page.read()

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        path = self.page.path
        self.page.close()
        Path(path).unlink(missing_ok=True)
        path.with_name(path.name.replace("heartbeat-", "stacks-", 1)).unlink(missing_ok=True)


def death_report(worker: WorkerProcess, status: int, *, oom: bool, node: str) -> FaultReport | None:
    """What a wait status means; None for exit code 0. The phase and step are those of the last heartbeat."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    reading = worker.reading()
    fault_class: FaultClass = "exit"
    cause = f"exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        fault_class = {signal.SIGKILL: "sigkill", signal.SIGSEGV: "sigsegv"}.get(-code, "signal")  # type: ignore
        cause = f"killed by {name}"
        if -code == signal.SIGKILL:
            if worker.kill_reason:
                cause = f"killed by its agent: {worker.kill_reason}"
            elif oom:
                fault_class, cause = "oom", "killed by the kernel: out of memory"
            else:
                cause = "SIGKILL, unknown sender"
        if worker.starved:
            fault_class, cause = "oom", worker.starved
        elif worker.hung:
            fault_class, cause = "hang", worker.hung
    elif worker.log.tail:
        cause = last_error(list(worker.log.tail)) or cause
    return FaultReport(
        generation=worker.generation,
        worker=worker.id,
        rank=worker.rank,
        node=node,
        pid=worker.pid,
        fault_class=fault_class,
        detected_by="heartbeat" if worker.hung else "waitpid",
        phase=reading.phase,
        step=reading.step or None,
        cause=cause,
        traceback="\n".join(worker.log.tail) if code > 0 else "",
        exit_code=code if code > 0 else None,
        signal=-code if code < 0 else None,
        declared_ns=time.monotonic_ns(),
        fault_ns=max(reading.step_ns, reading.phase_ns) or None,
        killed_by_us=bool(worker.kill_reason) and not worker.hung and not worker.starved,
    )


def not_started_report(worker: WorkerProcess, node: str, error: OSError) -> FaultReport:
    """A process that never was."""
    name = errno.errorcode.get(error.errno or 0, "error")
    return FaultReport(
        generation=worker.generation,
        worker=worker.id,
        rank=worker.rank,
        node=node,
        fault_class="exit",
        detected_by="waitpid",
        phase="launch",
        cause=f"the process could not be started: {error} ({name})",
        declared_ns=time.monotonic_ns(),
    )


def last_error(tail: list[str]) -> str:
    """The last line of the last traceback in a program's output, with its place: `ValueError: lr=-1 (train.py:12)`."""
    tail = [_RANK_PREFIX.sub("", line) for line in tail]  # torch puts it before every line
    starts = [i for i, line in enumerate(tail) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return ""
    place, message = "", ""
    for line in tail[starts[-1] + 1 :]:
        if line.startswith("  File "):
            parts = line.split('"')
            place = f"{parts[1]}:{parts[2].split('line ')[-1].split(',')[0]}" if len(parts) > 2 else ""
        elif line and not line.startswith(" "):
            message = line
            break
    return f"{message} ({place})" if message and place else message
