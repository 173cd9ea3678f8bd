"""The limits that control groups put on this process, version 1 and 2. Reads only; None means no limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a huge number


def memory_limit_bytes(pid: int | str = "self") -> int | None:
    """The tightest memory limit over the group and its parents, in bytes."""
    return _tightest(_folders("memory", pid), ("memory.max", "memory.limit_in_bytes"))


def memory_used_bytes(pid: int | str = "self") -> int | None:
    """Memory charged to the process's own group now, in bytes (page cache included)."""
    for folder in _folders("memory", pid):
        for name in ("memory.current", "memory.usage_in_bytes"):
            value = _number(folder / name)
            if value is not None:
                return value
    return None


def fullest_memory(least: float) -> tuple[int, int] | None:
    """(used, limit) in bytes of the first group, from the process's own up, of whose limit more than the fraction
    `least` is used; page cache, which the kernel takes back by itself, is no use."""
    for folder in _folders("memory", "self"):
        for used_name, limit_name in (
            ("memory.current", "memory.max"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is None or limit >= _NO_LIMIT:
                continue
            used = _number(folder / used_name)
            if used is None or used < limit * least:
                continue
            used -= _page_cache(folder)
            if used >= limit * least:
                return used, limit
    return None


def _page_cache(folder: Path) -> int:
    lines = dict(line.split(" ", 1) for line in (_text(folder / "memory.stat") or "").splitlines() if " " in line)
    names = ("inactive_file", "active_file", "slab_reclaimable")
    return sum(int(lines.get(f"total_{name}", lines.get(name, "0"))) for name in names)


def available_memory_bytes() -> int | None:
    """What this process may still take, in bytes: the machine's available memory, or less if a group limits it."""
    found = []
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = memory_limit_bytes(), memory_used_bytes()
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min(found, default=None)


def pids_limit(pid: int | str = "self") -> int | None:
    """The tightest limit on the number of tasks."""
    return _tightest(_folders("pids", pid), ("pids.max",))


def cpu_limit(pid: int | str = "self") -> float | None:
    """The tightest CPU quota, in CPUs."""
    quotas = []
    for folder in _folders("cpu", pid):
        text = _text(folder / "cpu.max")
        quota, _, period = (text or "").partition(" ")
        if text is None:
            quota, period = _text(folder / "cpu.cfs_quota_us") or "max", _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(controller: str, pid: int | str) -> Iterator[Path]:
    """The folders of the process's group for a controller, from its own up to the root that is visible here."""
    text = _text(Path(f"/proc/{pid}/cgroup"))
    for line in (text or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            top = _ROOT / controllers if (_ROOT / controllers).is_dir() else _ROOT / controller
        elif not controllers:
            top = _ROOT
        else:
            continue
        relative = os.path.normpath(group).lstrip("/")
        # In a container the path may name the host's view while only the root is mounted: missing folders read as None.
        for part in (relative, *(str(parent) for parent in Path(relative).parents)):
            yield top / part


def _tightest(folders: Iterator[Path], names: tuple[str, ...]) -> int | None:
    found = [_number(folder / name) for folder in folders for name in names]
    return min((value for value in found if value is not None and value < _NO_LIMIT), default=None)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
