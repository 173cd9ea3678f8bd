"""Running out of memory, before and after the kernel acts.

On cgroup v2 the kubelet sets `memory.oom.group`: when the limit is reached, every process of the container dies. So the
agent acts first: at 95 % of the limit, page cache left out, it ends the rank with the most anonymous memory.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ridethrough.health import cgroup
from ridethrough.launch import linux
from ridethrough.launch.workers import WorkerProcess

_PERIOD_S = 0.1
_FULL = 0.95
_REST_S = 1.0  # what a dead process held is given back by then
_BLAME_S = 10.0  # a kill counted longer ago explains no death
_SCORE = 300  # a worker's oom_score_adj above the agent's; its children inherit it


class MemoryGuard:
    """`end(worker, why)` is called for the rank that has to go. All methods run on the agent's event loop."""

    def __init__(self, workers: Mapping[str, WorkerProcess], end: Callable[[WorkerProcess, str], None]) -> None:
        self._workers = workers
        self._end = end
        self._rest_until_s = 0.0
        self._counted = linux.oom_kills()
        self._kills_s: list[float] = []

    async def loop(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_PERIOD_S)

    def look(self) -> None:
        self._count()
        now_s = time.monotonic()
        if now_s < self._rest_until_s:
            return
        full = cgroup.fullest_memory(_FULL)
        if full is None:
            return
        sizes = {w.id: anonymous_bytes(w.pid) for w in self._workers.values() if w.pid and not w.gone.is_set()}
        if not sizes:
            return
        largest = max(sizes, key=lambda name: sizes[name])
        self._rest_until_s = now_s + _REST_S
        used, limit = full
        self._end(
            self._workers[largest],
            f"out of memory: {used / 1e9:.2f} of {limit / 1e9:.2f} GB in use, {sizes[largest] / 1e9:.2f} GB by this "
            "rank, the most; ended before the kernel ends all",
        )

    def struck(self) -> bool:
        """Whether the kernel's killer explains a death by SIGKILL now; each of its kills explains one."""
        self._count()
        now_s = time.monotonic()
        self._kills_s = [s for s in self._kills_s if now_s - s < _BLAME_S]
        if not self._kills_s:
            return False
        self._kills_s.pop(0)
        return True

    def _count(self) -> None:
        counted = linux.oom_kills()
        self._kills_s += [time.monotonic()] * (counted - self._counted)
        self._counted = counted


def offer_to_killer(pid: int) -> None:
    """The kernel takes a worker or a spare before the agent and keeper. Raising the value needs no privilege."""
    try:
        ours = int(Path("/proc/self/oom_score_adj").read_text())
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(1000, ours + _SCORE)))
    except (OSError, ValueError):
        return


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a session's processes: a worker and its loaders."""
    return sum(_anonymous(p.pid) for p in linux.processes() if p.pid == pid or p.session == pid)


def _anonymous(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
