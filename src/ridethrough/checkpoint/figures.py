"""What a checkpointer tells: how a load went, and the running figures of its saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ridethrough.checkpoint.arena import POOL

if TYPE_CHECKING:
    from ridethrough.checkpoint.checkpointer import Checkpointer


@dataclass
class LoadReport:
    """What `load` did. `step`: finished steps in the loaded state, 0 for a fresh start. `tier`: "memory" (every
    rank's share was on its own node), "peer" (some came from another node's memory), "storage" or "fresh".
    `rejected`: (path, reason) of every attempt that was not used and is newer or damaged."""

    step: int
    tier: str
    source: str | None
    rejected: list[tuple[str, str]]
    checkpointer: Checkpointer | None = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Figures:
    """Counters of one checkpointer, for the ledger and metrics. Seconds and bytes; `stall_s` is time that the
    training thread spent in saves, fences included."""

    stall_s: float = 0.0
    saves: int = 0
    staged: int = 0
    committed: int = 0
    superseded: int = 0
    skipped: int = 0
    failed: int = 0
    held: int = 0  # snapshots for the memory tier alone
    not_held: int = 0  # skipped or torn ones
    bytes_committed: int = 0
    write_s: float = 0.0
    last_committed_step: int = 0
    last_committed_at: float | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory of this process's snapshots, all its checkpointers'."""
        return POOL.bytes_held()


class Stopwatch:
    """Adds the time spent inside it to `stall_s`."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_exc: object) -> None:
        self.figures.stall_s += time.perf_counter() - self.began
