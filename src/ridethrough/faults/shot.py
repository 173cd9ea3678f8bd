"""What a fault gets in hand when it fires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SCHEDULE_VARIABLE = "RIDETHROUGH_FAULTS"
"""Names the schedule's file in the environment of workers and keeper."""

PhaseCallback = Callable[[str, int], None]


class InjectedFault(RuntimeError):
    """Raised by the fault kind `exception`, and by a hang that nobody ended within its limit."""


class FaultRefused(RuntimeError):
    """A planned fault would harm more than its job here; the message says what to do."""


class RunLike(Protocol):
    """The part of `ridethrough.Run` that the injector needs."""

    @property
    def rank(self) -> int: ...

    @property
    def run_dir(self) -> Path | None: ...

    def record(self, kind: str, **fields: Any) -> None: ...

    def observe(self, callback: PhaseCallback) -> None: ...


@dataclass(frozen=True)
class Shot:
    """One fault about to fire in this process: main thread, at the entry of `phase` of `step`.

    `follow(callback)` has callback(phase, step) called at each later phase entry of this generation until it
    returns True.
    """

    fault: str
    args: Mapping[str, Any]
    phase: str
    step: int
    follow: Callable[[Callable[[str, int], bool]], None]
