"""The few Linux calls that Python does not offer, and what /proc tells about processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """The calling process gets `sig` when its parent ends. Must be called in the main thread of a child whose parent
    was started by its own main thread; if the parent is gone already, the process ends itself."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's, so that none escapes us."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class ProcessStat:
    """From /proc/PID/stat: state letter, parent, session."""

    pid: int
    state: str
    parent: int
    session: int


def stat(pid: int) -> ProcessStat | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[3]))


def processes() -> Iterator[ProcessStat]:
    """Every process that /proc shows, zombies left out."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = stat(int(name))
            if found is not None and found.state != "Z":
                yield found


def children() -> list[ProcessStat]:
    """Our own children, zombies included."""
    me = os.getpid()
    found = [stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [p for p in found if p is not None and p.parent == me]


def environ_has(pid: int, *assignments: str) -> bool:
    """Whether the process was started with each `NAME=value` (what a program changed later is not seen)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return {a.encode() for a in assignments} <= set(file.read().split(b"\0"))
    except OSError:
        return False


def tree(root: int, *marks: str) -> set[int]:
    """A process, its descendants, its session's members, and whoever carries all of the environment's `marks`."""
    known = {p.pid: p for p in processes() if p.pid != os.getpid()}
    members = {pid for pid, p in known.items() if pid == root or p.session == root or environ_has(pid, *marks)}
    grown = True
    while grown:
        more = {pid for pid, p in known.items() if p.parent in members} - members
        members |= more
        grown = bool(more)
    return members


def kill_tree(root: int, *marks: str) -> set[int]:
    """SIGKILL to the whole tree; returns the processes that it was sent to. Repeats until nothing new appears.

    `marks` must name the job too: jobs share a machine, and each has a worker w0-1."""
    killed: set[int] = set()
    for _ in range(5):
        alive = tree(root, *marks) - killed
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        killed |= alive
    return killed


def is_gone(pid: int) -> bool:
    """True for a process that has ended, zombies included."""
    found = stat(pid)
    return found is None or found.state in "ZX"


def run_delay_ns(pid: int) -> int:
    """How long the process's main thread has been ready to run without a processor, in ns; 0 where nothing tells."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def oom_kills() -> int:
    """How often the kernel's OOM killer has struck in our memory cgroup (v2, then v1); 0 where nothing tells."""
    for path, key in (("memory.events", b"oom_kill"), ("memory.oom_control", b"oom_kill")):
        for line in _cgroup_file(path):
            name, _, value = line.partition(b" ")
            if name == key:
                return int(value)
    return 0


def _cgroup_file(name: str) -> list[bytes]:
    try:
        with open("/proc/self/cgroup", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(b":", 2)
        if controllers == b"":
            folder = b"/sys/fs/cgroup" + path
        elif b"memory" in controllers.split(b","):
            folder = b"/sys/fs/cgroup/memory" + path
        else:
            continue
        try:
            with open(folder + b"/" + name.encode(), "rb") as file:
                return file.read().splitlines()
        except OSError:
            continue
    return []
