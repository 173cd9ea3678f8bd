"""What `save` hands back: how far one snapshot has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ridethrough.checkpoint.errors import CheckpointError, CheckpointTimeout

FILLING, STAGED, COMMITTED, SUPERSEDED, FAILED = "filling", "staged", "committed", "superseded", "failed"
_FINAL = (COMMITTED, SUPERSEDED, FAILED)


class Ticket:
    """One save. `state` is filling, staged (safe from later changes and from this process's death), committed
    (durable), superseded (a newer save was written instead, or the generation ended) or failed (`error` says
    why)."""

    def __init__(self, step: int, durable: bool, settle: Callable[[Ticket], None], in_memory: bool = False) -> None:
        self.step, self.durable, self.in_memory = step, durable, in_memory
        self.state = FILLING
        self.path: str | None = None
        self.error: str | None = None
        self.seconds: float | None = None
        self.nbytes: int | None = None
        self._settle = settle
        self._elsewhere: Callable[[int], bool | None] | None = None  # is this step on another node; None: never
        self._changed = threading.Condition()

    def advance(self, state: str, **details: Any) -> None:
        """Called by the checkpointer; a final state is never left."""
        with self._changed:
            if self.state not in _FINAL:
                self.state = state
                for key, value in details.items():
                    setattr(self, key, value)
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        return self.state in _FINAL

    def waited(self, timeout_s: float) -> bool:
        """Whether its final state is reached within that time. Never raises."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout_s)

    def _wait(self, reached: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        self._settle(self)
        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise CheckpointTimeout(
                    f"save of step {self.step} not {what} within {timeout_s:g} s (now {self.state})"
                )
        if self.state == FAILED:
            raise CheckpointError(self.error or f"save of step {self.step} failed")

    def staged(self, timeout_s: float | None = None) -> bool:
        """Wait until the snapshot is complete on this rank; False if it was dropped before. Callable from any
        thread; on the training thread it finishes an overlapped copy at once. Raises CheckpointTimeout, or
        CheckpointError if it failed."""
        self._wait(lambda: self.state != FILLING, timeout_s, "staged")
        return self.state != SUPERSEDED

    def committed(self, timeout_s: float | None = None) -> str | None:
        """Wait until it is durable; returns its folder, or None when it was superseded (never for
        durable=True). Raises CheckpointTimeout, or CheckpointError naming the file and the rank."""
        self._wait(lambda: self.done, timeout_s, "committed")
        return self.path

    def replicated(self, timeout_s: float | None = None) -> bool:
        """Wait until another node holds this snapshot, or a newer one; False when that is not so in time, at once where
        there are no replicas or it was dropped. Raises CheckpointTimeout (not even staged), or CheckpointError if it
        failed."""
        self._wait(lambda: self.state != FILLING, timeout_s, "staged")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.state != SUPERSEDED:
            answer = self._elsewhere(self.step) if self._elsewhere is not None else None
            if answer is None or answer:
                return bool(answer)
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return False
