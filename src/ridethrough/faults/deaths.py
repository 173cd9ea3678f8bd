"""Ways to die or stop. None of them leaves a core file."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

from ridethrough.faults.shot import FaultRefused, InjectedFault, Shot
from ridethrough.health.cgroup import memory_limit_bytes

CHUNK_BYTES = 64 << 20


def sigkill(shot: Shot) -> None:
    """Killed at once, as by the kernel or an operator."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def sigstop(shot: Shot) -> None:
    """Stopped until someone continues it; training then goes on where it was."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sigsegv(shot: Shot) -> None:
    """A true fault in native code (faulthandler, if enabled, writes the stack first)."""
    _no_core_file()
    ctypes.string_at(0)


def sigabrt(shot: Shot) -> None:
    """What a failed check in a native library does."""
    _no_core_file()
    os.abort()


def exit_code(shot: Shot) -> None:
    """Gone with a status, without atexit handlers, flushes or closed groups."""
    os._exit(int(shot.args["code"]))


def guard_oom(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused unless the kernel would kill within a memory cgroup smaller than the machine."""
    _oom_limit_bytes()


def oom(shot: Shot) -> None:
    """Take memory until the kernel kills this process, which has put itself first in line."""
    limit = _oom_limit_bytes()
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    held: list[mmap.mmap] = []
    page = b"\x01" * mmap.PAGESIZE
    while len(held) * CHUNK_BYTES <= 1.25 * limit:
        chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(CHUNK_BYTES // mmap.PAGESIZE):
            chunk.write(page)
        held.append(chunk)
    raise InjectedFault(
        f"injected {shot.fault}: took {len(held) * CHUNK_BYTES} bytes under a limit of {limit} "
        "and was not killed (is there swap?)"
    )


def _oom_limit_bytes() -> int:
    limit = memory_limit_bytes()
    if limit is None or limit > 0.9 * psutil.virtual_memory().total:
        raise FaultRefused(
            "fault kind oom: this process has no memory cgroup limit below the machine's memory, "
            "the whole machine would run out: start the job in a limited container, "
            "or with `systemd-run --scope -p MemoryMax=8G`"
        )
    return limit


def _no_core_file() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
