"""One generation as this rank lives it: what main thread and monitor thread share, under one lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ridethrough.generation.policy import Policy
from ridethrough.restart.exceptions import LeaveGeneration

_HOLD_LIMIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """This rank's part of the plan, and the job's limits."""

    epoch: int
    generation: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    master_addr: str
    master_port: int
    prefix: str
    restarts: int
    resume: dict[str, Any]
    policy: Policy

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Place:
        told = {name: message[name] for name in cls.__dataclass_fields__}
        return cls(**{**told, "policy": Policy(**told["policy"])})


class Stage:
    """The agreement on where to stop, and whether the generation is over.

    A planned stop: the agent asks each rank for the step it is in (`ask`), every rank holds at its next boundary
    until the answer (`stop_at`), and ends after that step. A fault (`end`) breaks any wait.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._changed = threading.Condition()
        self._over = False
        self._asked = False
        self._stop_at: int | None = None
        self._step = 0
        self.left = threading.Event()
        self.cut = threading.Event()  # the groups' abort has come to its end

    @property
    def over(self) -> bool:
        return self._over

    @property
    def stopping(self) -> bool:
        return self._asked

    def end(self) -> None:
        """Monitor thread: the generation is over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def ask(self) -> int:
        """Monitor thread: the step in progress; none is begun behind it before `stop_at`."""
        with self._changed:
            self._asked = True
            return self._step

    def stop_at(self, step: int) -> None:
        with self._changed:
            self._stop_at = step
            self._changed.notify_all()

    def check(self) -> None:
        """Main thread, at a safe point: raises LeaveGeneration if the generation is over."""
        if self._over:
            raise LeaveGeneration("a fault ended this generation")

    def begin(self, step: int) -> bool:
        """Main thread: False if this step is behind the agreed last one."""
        with self._changed:
            if self._asked and self._stop_at is None:
                self._changed.wait_for(lambda: self._over or self._stop_at is not None, _HOLD_LIMIT_S)
            if self._over:
                raise LeaveGeneration("a fault ended this generation")
            if self._asked and (self._stop_at is None or step > self._stop_at):
                return False
            self._step = step
            return True
