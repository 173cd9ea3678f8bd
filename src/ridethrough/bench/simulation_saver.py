"""Which state is safe where at any moment of a simulated run."""

from __future__ import annotations

from ridethrough.bench.simulation_model import Saving


class Saver:
    """One storage, one save written at a time. Steps are those of the job; times are seconds of the simulation."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self.durable = 0
        self.superseded = 0
        self.written = 0
        self.oldest_s = 0.0  # the largest age of the newest durable state at a save
        self._durable_s = 0.0
        self._writing: tuple[int, float, float] | None = None  # step, when it is durable, when its state was
        self._queued: tuple[int, float] | None = None

    def boundary(self, step: int, now_s: float) -> float:
        """A step is done; returns how long training is blocked by a save."""
        saving = self.saving
        if saving.mode == "none" or step % saving.interval:
            return 0.0
        self.advance(now_s)
        self.oldest_s = max(self.oldest_s, now_s - self._durable_s)
        if saving.mode == "sync":
            self._commit(step, now_s)
            return saving.stage_s + saving.write_s
        if saving.mode == "wait":
            waited = 0.0 if self._writing is None else self._writing[1] - now_s
            self.advance(now_s + waited)
            staged_s = now_s + waited + saving.stage_s
            self._writing = (step, staged_s + saving.write_s, now_s)
            return waited + saving.stage_s
        if self._writing is None:
            self._writing = (step, now_s + saving.stage_s + saving.write_s, now_s)
        else:
            self.superseded += self._queued is not None
            self._queued = (step, now_s)
        return saving.stage_s

    def advance(self, now_s: float) -> None:
        """Writes that are done by now are durable."""
        while self._writing is not None and self._writing[1] <= now_s:
            step, done_s, state_s = self._writing
            self._commit(step, state_s)
            self._writing = None
            if self._queued is not None:
                queued, queued_s = self._queued
                self._writing, self._queued = (queued, done_s + self.saving.write_s, queued_s), None

    def drain_s(self, step: int, now_s: float) -> float:
        """How long the end takes: what is being written, then the last state if it is not that."""
        if self.saving.mode == "none":
            return 0.0
        self.advance(now_s)
        left = 0.0 if self._writing is None else self._writing[1] - now_s
        last = self._writing[0] if self._writing is not None else self.durable
        return left + (self.saving.write_s if last < step else 0.0)

    def at_fault(self, step: int, now_s: float, kind: str, process_lives: bool) -> int:
        """The newest step that a recovery from a failure at `now_s` finds, with `step` finished ones. What had been
        handed to a process that outlives the ranks is written on; else it is lost with them."""
        self.advance(now_s)
        every = self.saving.memory_every
        if every and kind != "job":
            lag = self.saving.replica_lag if kind == "node_loss" else 0
            return max(self.durable, (step - min(step, lag)) // every * every)
        if not process_lives:
            self._writing = self._queued = None
        return self.durable

    def resumed(self, step: int) -> None:
        """What is newer than the resumed state belongs to a time line that is over."""
        if self._queued is not None and self._queued[0] > step:
            self._queued = None
        if self._writing is not None and self._writing[0] > step:
            self._writing = None

    def _commit(self, step: int, state_s: float) -> None:
        self.durable = max(self.durable, step)
        self._durable_s = state_s
        self.written += 1
