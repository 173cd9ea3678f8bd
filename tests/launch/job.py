"""Starts real jobs, waits with limits, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ridethrough.launch import guard
from ridethrough.ledger.partition import read_events

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 240.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], limit_s: float = LIMIT_S, every_s: float = 0.02
) -> Any:
    """The condition's first true value. Fails with `what` after the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(every_s)
    raise AssertionError(f"after {limit_s} s: {what() if callable(what) else what}")


class Job:
    """Launchers of one job, in one folder. Use as a context manager: whatever happens, nothing survives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self.mark = secrets.token_hex(8)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.patient = folder / "patient.json"  # the machine may be busy with other things
        self.patient.write_text('{"rebuild_limit_s": 60}')
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)

    def start(
        self, *args: str, name: str = "agent", env: dict[str, str] | None = None, before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """`ridethrough ARGS`, behind the words in `before`; output to <name>.log. Ends with this process."""
        if args[0] == "run" and "--policy" not in args:
            args = ("run", "--policy", str(self.patient), *args[1:])
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        process = subprocess.Popen(
            guard.command(os.getpid(), signal.SIGKILL, [*before, sys.executable, "-m", "ridethrough", *args]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env={**os.environ, "JOB_MARK": self.mark, "TMPDIR": str(self.temporary), **(env or {})},
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def run(self, *args: str, **options: Any) -> int:
        return self.wait(self.start(*args, **options))

    def wait(self, process: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> int:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.text()}") from None

    def text(self, name: str | None = None) -> str:
        logs = [self.folder / f"{name}.log"] if name else sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def entered(self) -> list[dict[str, Any]]:
        path = self.out / "entered.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_step(self) -> int:
        return max((int(p.stem.split("-")[1]) for p in self.out.glob("step-*.json")), default=0)

    def results(self) -> list[float]:
        return [json.loads(p.read_text())["total"] for p in sorted(self.out.glob("result-*.json"))]

    def events(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / "runs" / run_id) if e["kind"] == kind]

    def alive(self) -> list[int]:
        """Every process that still carries this job's mark."""
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if f"JOB_MARK={self.mark}".encode() in environ.split(b"\0") and state not in "ZX":
                found.append(int(name))
        return found

    def check_nothing_left(self) -> None:
        """No process of the job, no temporary file."""
        wait_until(lambda: not self.alive(), "processes are left", 60.0)
        wait_until(lambda: not self._files(), f"files are left: {self._files()}", 20.0)

    def _files(self) -> list[str]:
        """torch makes the folder of its compile cache when it is imported, and keeps it on purpose."""
        return [p.name for p in self.temporary.iterdir() if not p.name.startswith("torchinductor_")]


def expected(steps: int, world_size: int) -> float:
    """What count.py adds up to in a world that never changed."""
    return float(sum(step * sum(range(1, world_size + 1)) for step in range(1, steps + 1)))
