"""What has happened to a job so far, as far as decisions depend on it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class History(BaseModel):
    """Changed only by `decide`, by progress and by lost nodes. It travels with each plan, so that a coordinator that
    was started again goes on counting. Times (`*_s`) are the machine's clock; `rebase` moves them to another one's."""

    restarts: int = 0
    rank_faults: dict[int, int] = Field(default_factory=dict)
    same_fault: dict[str, int] = Field(default_factory=dict)
    no_progress: int = 0
    best_step: int = 0
    best_at_incident: int = 0
    incidents: int = 0
    last_rank: int | None = None
    streak: int = 0
    cheap_s: list[float] = Field(default_factory=list)
    costly_s: list[float] = Field(default_factory=list)
    host_marks_s: dict[str, list[float]] = Field(default_factory=dict)
    cordoned: list[str] = Field(default_factory=list)
    older_than: int | None = None
    longest_rebuild_s: float = 0.0

    def progressed(self, step: int, *, forgive_after_steps: int = 0) -> None:
        """A rank has finished `step` for good or for the time being."""
        if step <= self.best_step:
            return
        self.best_step = step
        self.no_progress = 0
        self.streak = 0
        if forgive_after_steps and step - self.best_at_incident >= forgive_after_steps:
            self.restarts = 0
            self.rank_faults.clear()

    def mark_host(self, name: str, now_s: float, *, cordon_after: int, window_s: float) -> bool:
        """The host was lost or guilty. True if it is cordoned by that."""
        if not name:
            return False
        marks = [t for t in self.host_marks_s.get(name, []) if t > now_s - window_s]
        self.host_marks_s[name] = [*marks, now_s]
        if not cordon_after or len(marks) + 1 < cordon_after or name in self.cordoned:
            return False
        self.cordoned.append(name)
        return True

    def rebase(self, now_s: float) -> None:
        """The times came from another coordinator's clock: all count as just now, so that no budget is got around."""
        self.cheap_s = [now_s] * len(self.cheap_s)
        self.costly_s = [now_s] * len(self.costly_s)
        self.host_marks_s = {name: [now_s] * len(times) for name, times in self.host_marks_s.items()}
