"""Is this rank's machine well? Checks that run side by side, each with a limit of its own.

PASS, FAIL, or UNAVAILABLE where nothing can be said; only a FAIL ever takes anybody out. A check that does not end in
time is a FAIL of that check, and nobody waits for it longer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridethrough.health.cgroup import available_memory_bytes

Status = Literal["PASS", "FAIL", "UNAVAILABLE"]
Finding = tuple[Status, str]
Check = Callable[[], Finding]
LIMIT_S = 1.0
_LEAST_MEMORY_BYTES = 256 << 20
_LEAST_DISK_BYTES = 64 << 20
_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Outcome:
    """`seconds`: how long it took, or was waited for."""

    check: str
    status: Status
    detail: str
    seconds: float


def run_checks(checks: Mapping[str, Check], limit_s: float = LIMIT_S) -> list[Outcome]:
    """All at once, in threads of their own; takes `limit_s` at most. A check that raises fails."""
    found: dict[str, Outcome] = {}
    begun = time.monotonic()

    def run(name: str, check: Check) -> None:
        try:
            status, detail = check()
        except Exception as error:  # a check may be the user's own
            status, detail = "FAIL", f"{type(error).__name__}: {error}"
        found[name] = Outcome(name, status, detail, time.monotonic() - begun)

    threads = {
        name: threading.Thread(target=run, args=(name, check), name=f"ridethrough-check-{name}", daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, begun + limit_s - time.monotonic()))
    late = {name: Outcome(name, "FAIL", f"did not end within {limit_s:g} s", limit_s) for name in checks}
    return [found.get(name, late[name]) for name in checks]


def users_check(function: Callable[[], object]) -> Check:
    """A user's own function: it fails by raising, or by returning False or a text that says what is wrong."""

    def check() -> Finding:
        said = function()
        if said is False:
            return "FAIL", "it returned False"
        return ("FAIL", said) if isinstance(said, str) and said else ("PASS", "")

    return check


def memory() -> Finding:
    """Memory that this process may still take, under the tightest control group."""
    free = available_memory_bytes()
    if free is None:
        return "UNAVAILABLE", "neither /proc/meminfo nor a control group tells"
    return "PASS" if free >= _LEAST_MEMORY_BYTES else "FAIL", f"{free >> 20} MiB are available"


def disk(folder: Path) -> Check:
    """Room in the folder's file system, and that it is not read-only. A file system that hangs fails by the limit."""

    def check() -> Finding:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            return "FAIL", f"{folder}: {error.strerror}"
        free = found.f_bavail * found.f_frsize
        if found.f_flag & os.ST_RDONLY:
            return "FAIL", f"{folder} is read-only"
        return "PASS" if free >= _LEAST_DISK_BYTES else "FAIL", f"{free >> 20} MiB are free in {folder}"

    return check


def links_up() -> frozenset[str]:
    """Network interfaces with hardware behind them, and InfiniBand or EFA ports, that are up now."""
    up = set()
    for interface in _entries(_NET):
        if (interface / "device").exists() and _text(interface / "operstate") in ("up", "unknown"):
            up.add(interface.name)
    for device in _entries(_INFINIBAND):
        for port in _entries(device / "ports"):
            if "ACTIVE" in _text(port / "state"):
                up.add(f"{device.name}/{port.name}")
    return frozenset(up)


def links(before: frozenset[str]) -> Check:
    """Every link that was up `before` still is."""

    def check() -> Finding:
        if not before:
            return "UNAVAILABLE", "no link of a device was up at the start"
        down = sorted(before - links_up())
        return ("FAIL", f"down: {', '.join(down)}") if down else ("PASS", f"up: {', '.join(sorted(before))}")

    return check


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
