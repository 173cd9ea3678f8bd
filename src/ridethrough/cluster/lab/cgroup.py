"""A memory cgroup for each pod, as the kubelet makes it: a limit, and on cgroup v2 all die together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ridethrough.cluster.lab.network import LabError

_ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """Below `pods_cgroup()`. `limit_bytes` holds for all processes in it, memfds and /dev/shm included."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.unified = _is_unified()
        self.path = pods_cgroup() / name
        try:
            self.path.mkdir()
            if self.unified:
                (self.path / "memory.max").write_text(str(limit_bytes))
                with contextlib.suppress(OSError):
                    (self.path / "memory.swap.max").write_text("0")
                (self.path / "memory.oom.group").write_text("1")
            else:
                (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise LabError(f"{self.path}: {error.strerror}; the lab needs a memory cgroup of its own") from None

    def pids(self) -> list[int]:
        try:
            return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def oom_kills(self) -> int:
        """Processes that the kernel killed for memory."""
        file = "memory.events" if self.unified else "memory.oom_control"
        for line in (self.path / file).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def kill_all(self) -> None:
        """SIGKILL to every process, until none is left (at most 10 s)."""
        end = time.monotonic() + 10
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise LabError(f"{self.path}: processes {pids} do not die")
            time.sleep(0.01)

    def remove(self) -> None:
        self.kill_all()
        for _ in range(100):  # the last process may be in it a moment longer
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
        raise LabError(f"{self.path} cannot be removed")


def _is_unified() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def pods_cgroup() -> Path:
    """Where pods' cgroups are made. Raises LabError."""
    unified = _is_unified()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if unified and number == "0":
            return nearest_parent(_ROOT / path.lstrip("/"), _ROOT)
        if not unified and "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
    raise LabError("no memory cgroup to make pods in")


def nearest_parent(own: Path, root: Path) -> Path:
    """On cgroup v2: the nearest of `own` and its ancestors that hands the memory controller on to its children. One
    with processes of its own cannot. Raises LabError."""
    for folder in (own, *own.parents):
        if "memory" in (folder / "cgroup.subtree_control").read_text().split():
            return folder
        if folder == root:
            break
    raise LabError(
        f"no cgroup from {own} up has memory in its cgroup.subtree_control: start the lab below one that has"
    )
