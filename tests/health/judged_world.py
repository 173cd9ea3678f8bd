"""Heartbeat pages made up for the judge: a clock in seconds, ranks that move or stand still."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import Reading
from ridethrough.health.judge import Judge, Verdict

S = 1_000_000_000
START_S = 1000.0
_CAPPED = ("data", "save", "eval", "load")


@dataclass
class World:
    """Ranks with one group over all of them; `run(seconds)` looks ten times a second, as the agent does."""

    size: int = 4
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        self.judge = Judge(self.policy)
        self.judge.plan_changed(self.size)
        self.now_s = START_S
        self.frozen: set[int] = set()
        blank = Reading(1, 0, "init", self.ns, 0, 0, self.ns, 0, 0, 0, 0)
        self.ranks = dict.fromkeys(range(self.size), blank)
        self.verdicts: list[Verdict] = []

    @property
    def ns(self) -> int:
        return int(self.now_s * S)

    def set(self, rank: int, **fields: object) -> None:
        self.ranks[rank] = replace(self.ranks[rank], **fields)  # type: ignore[arg-type]

    def phase(self, name: str, *ranks: int) -> None:
        for rank in ranks or self.ranks:
            resumed = {"resumed_ns": self.ns} if self.ranks[rank].phase in _CAPPED else {}
            self.set(rank, phase=name, phase_ns=self.ns, **resumed)

    def step(self, number: int, *ranks: int, took_s: float = 0.0) -> None:
        """Begins a step; `took_s`: how long the one before took."""
        for rank in ranks or self.ranks:
            x = self.ranks[rank]
            took_ns = int(took_s * S)
            recent = (*x.recent_ns, took_ns)[-16:] if took_s else x.recent_ns
            phase = "step" if took_s else "first_step"
            self.set(
                rank,
                step=number,
                step_ns=self.ns,
                phase=phase,
                phase_ns=self.ns,
                recent_ns=recent,
                last_step_ns=took_ns,
                num_steps=x.num_steps + bool(took_s),
            )

    def collective(self, group: int, *ranks: int) -> None:
        for rank in ranks or self.ranks:
            begun = dict(self.ranks[rank].groups)
            begun[group] = begun.get(group, 0) + 1
            self.set(rank, groups=tuple(begun.items()), collectives=sum(begun.values()))

    def run(self, seconds: float, every_s: float = 0.1) -> Verdict | None:
        """Time passes; returns the first verdict, if there is one, and stops there."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + every_s)
            for rank in self.ranks:
                if rank not in self.frozen:
                    self.set(rank, gil_ns=self.ns)
            verdict = self.judge.look(self.ns, self.ranks)
            if verdict is not None:
                self.verdicts.append(verdict)
                return verdict
        return None

    def train(self, first: int, last: int, step_s: float = 0.1) -> None:
        """All ranks do these steps; leaves them in step `last`, that has begun."""
        self.run(0.1)
        self.step(first)
        for number in range(first + 1, last + 1):
            self.collective(0)
            assert self.run(step_s) is None
            self.step(number, took_s=step_s)
