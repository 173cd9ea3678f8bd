"""A place for one measured job: a folder, a mark on all of its processes, and the moment each of them ended.

    with Place() as place:
        place.start([...], name="agent")
        ...
    # here no process with the mark is alive, and the folder is gone

Every process of the job that connects to the roll (`<folder>/roll`) is watched through a pidfd, so that its end is
known to the millisecond whoever its parent is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ridethrough.generation.peer import peer_credentials

MARK = "BENCH_MARK"
_GONE_LIMIT_S = 20.0
OF_A_JOB = ("RIDETHROUGH_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "WORLD_SIZE", "MASTER_", "BENCH_")


class Place:
    """One job's folder and processes. `ended_ns` is filled by a thread: process id -> monotonic ns of its end."""

    def __init__(self, keep: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rt-bench-"))
        self.mark = secrets.token_hex(8)
        self.keep = keep
        self.cwd = self.folder  # of its processes
        self.cleanup = contextlib.ExitStack()  # what goes when its processes have ended
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended_ns: dict[int, int] = {}
        self._roll = socket.socket(socket.AF_UNIX)
        self._roll.bind(str(self.folder / "roll"))
        self._roll.listen(256)
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._call_roll, name="bench-roll", daemon=True)
        self._thread.start()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process of the job in a session of its own; its output goes to `<name>.log`."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env={**env, MARK: self.mark, "TMPDIR": str(self.folder)},
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """Ends a process and its session; waits for it."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def alive(self) -> list[int]:
        """Every process that carries the mark."""
        return list(marked(f"{MARK}={self.mark}"))

    def last_words(self) -> str:
        """The last line of each log, for an error message."""
        logs = [path.read_text(errors="replace").strip() for path in sorted(self.folder.glob("*.log"))]
        return "; ".join(dict.fromkeys(text.splitlines()[-1][-200:] for text in logs if text))

    def stop(self) -> None:
        """Ends everything; what forks meanwhile is found in the next round. Raises RuntimeError if it can't."""
        end = time.monotonic() + _GONE_LIMIT_S
        while left := self.alive():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise RuntimeError(f"these processes of the bench do not end: {left}")
            time.sleep(0.02)
        for process in self.processes.values():
            process.wait()

    def close(self) -> None:
        """Ends everything and removes the folder; its logs and events go to `keep` first, if that was given."""
        try:
            self.stop()
            self.cleanup.close()
        finally:
            os.write(self._woken, b"x")
            self._thread.join(5.0)
            self._roll.close()
            os.close(self._wake)
            os.close(self._woken)
            if self.keep is not None:
                _keep(self.folder, self.keep)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _call_roll(self) -> None:
        poll = select.poll()
        poll.register(self._roll, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        watched: dict[int, int] = {}  # pidfd -> pid
        callers: list[socket.socket] = []
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    for pidfd in watched:
                        os.close(pidfd)
                    for caller in callers:
                        caller.close()
                    return
                if fd == self._roll.fileno():
                    self._enrol(poll, watched, callers)
                else:
                    self.ended_ns[watched.pop(fd)] = time.monotonic_ns()
                    poll.unregister(fd)
                    os.close(fd)

    def _enrol(self, poll: select.poll, watched: dict[int, int], callers: list[socket.socket]) -> None:
        caller, _ = self._roll.accept()
        callers.append(caller)
        pid, _ = peer_credentials(caller)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended_ns[pid] = time.monotonic_ns()
            return
        watched[pidfd] = pid
        poll.register(pidfd, select.POLLIN)


def marked(entry: str) -> Iterator[int]:
    """Live processes with this NAME=VALUE in their environment."""
    wanted = entry.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if wanted in environ.split(b"\0") and state not in "ZX":
            yield int(name)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of a job that it may itself be in: one thread per rank, loopback
    only, output at once; and `more`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}
    return {**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", **more}


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the bench as Ctrl-C does, so that it cleans up. Main thread only."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port(count: int = 1) -> int:
    """A port that is free now, with the `count` - 1 above it."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except (OSError, OverflowError):
                continue
            return port


def _keep(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".log", ".jsonl", ".json"):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
