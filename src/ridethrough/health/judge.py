"""Tells a hung rank from a slow one. Pure: readings and the time go in, verdicts come out.

Progress means steps. A step has a learned deadline; every other phase has a fixed cap. While any rank is in a phase
with a cap of its own (loading data, saving, evaluating), its peers may be waiting for it, so nobody is judged by the
step's deadline until that cap is over. The rank that did not arrive is the guilty one: the lowest step, then the
fewest collectives begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ridethrough.generation.policy import Policy
from ridethrough.health.heartbeat import IN_STEP, Reading

_S = 1_000_000_000
_WINDOW = 200
_LEARN = 8  # steps before the learned deadline is trusted
_LATE_S = 0.25  # a judge that comes later than this was not scheduled, and the ranks were probably not either
_AGAIN_FACTOR, _AGAIN_FLOOR_S = 10.0, 10.0  # first step of a later generation, from those already seen


@dataclass(frozen=True)
class Verdict:
    """`guilty` hang since `age_s`; the deadline was `deadline_s`. Times in seconds."""

    guilty: tuple[int, ...]
    phase: str
    step: int
    age_s: float
    deadline_s: float


class Judge:
    """Judges the ranks of one node (or, with readings of all nodes, of the job). Call `look` several times a second."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._durations: deque[int] = deque(maxlen=_WINDOW)
        self._counted: dict[int, int] = {}
        self._generation = 0
        self._last_look_ns = 0
        self._grace_ns = 0
        self._scale = 1.0
        self.longest_s: dict[str, float] = {}

    def step_deadline_s(self) -> float:
        """Learned: factor x 99th percentile of the last 200 steps, not below the floor; the first step's cap before."""
        if len(self._durations) < _LEARN:
            return self._policy.first_step_limit_s
        ordered = sorted(self._durations)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] / _S
        return max(self._policy.hang_floor_s, self._policy.hang_factor * p99) * self._scale

    def exonerate(self) -> None:
        """The last verdict was wrong (every rank was moving): deadlines double."""
        self._scale *= 2

    def look(self, now_ns: int, readings: Mapping[int, Reading]) -> Verdict | None:
        """`readings` by rank. Returns a verdict at most once per generation and look."""
        late_ns = now_ns - self._last_look_ns if self._last_look_ns else 0
        self._last_look_ns = now_ns
        if late_ns > _LATE_S * _S:
            self._grace_ns += late_ns
        inside = {r: x for r, x in readings.items() if x.generation and x.phase not in ("outside", "held")}
        self._learn(inside)
        if not inside:
            return None
        now_ns -= self._grace_ns
        capped = [(r, x, self._cap_s(x)) for r, x in inside.items() if x.phase not in IN_STEP]
        for rank, x, cap_s in capped:
            age_s = (now_ns - x.phase_ns) / _S
            self._seen(x.phase, age_s)
            if age_s > cap_s:
                return Verdict((rank,), x.phase, x.step, age_s, cap_s)
        if capped:
            return None
        ages_s = [(now_ns - max(x.step_ns, x.resumed_ns)) / _S for x in inside.values()]
        deadline_s = self.step_deadline_s()
        # Peers that wait for a late rank are late themselves, by up to one step less; where ranks do not wait for each
        # other, one alone may be late for longer.
        waiting = min(ages_s) > deadline_s / 2
        if max(ages_s) <= (deadline_s if waiting else 3 * deadline_s):
            return None
        guilty = self._guilty(inside)
        worst = inside[guilty[0]]
        return Verdict(guilty, worst.phase, worst.step, max(ages_s), deadline_s)

    def within_cap(self, now_ns: int, x: Reading) -> bool:
        """Whether the rank is in a phase that may take long, and that has not yet."""
        if x.phase in IN_STEP or x.phase in ("outside", "held"):
            return False
        return (now_ns - self._grace_ns - x.phase_ns) / _S <= self._cap_s(x)

    def _guilty(self, inside: Mapping[int, Reading]) -> tuple[int, ...]:
        lowest = min(x.step for x in inside.values())
        behind = {r: x for r, x in inside.items() if x.step == lowest}
        fewest = min(x.collectives for x in behind.values())
        return tuple(sorted(r for r, x in behind.items() if x.collectives == fewest))

    # A process is known from its first reading on: what it did before that is not counted.
    def _learn(self, inside: Mapping[int, Reading]) -> None:
        generation = max((x.generation for x in inside.values()), default=self._generation)
        if generation != self._generation:
            self._generation = generation
            self._grace_ns = 0
        for rank, x in inside.items():
            fresh = x.num_steps - self._counted.get(rank, x.num_steps)
            self._counted[rank] = x.num_steps
            for duration in x.recent_ns[len(x.recent_ns) - min(fresh, len(x.recent_ns)) :]:
                self._durations.append(duration)
                self._seen("step", duration / _S)
                self._grace_ns = 0

    def _seen(self, phase: str, age_s: float) -> None:
        if age_s > self.longest_s.get(phase, 0.0):
            self.longest_s[phase] = age_s

    def _cap_s(self, x: Reading) -> float:
        p = self._policy
        return {
            "recovery": p.rebuild_limit_s,
            "init": p.init_limit_s,
            "load": p.load_limit_s,
            "first_step": self._first_step_s(x),
            "data": p.data_limit_s,
            "save": p.save_limit_s,
            "eval": p.eval_limit_s,
            "finish": p.finish_limit_s,
        }[x.phase]

    def _first_step_s(self, x: Reading) -> float:
        """Compilation may make the very first step long; a later generation's is known from those before."""
        seen = self.longest_s.get("first_step")
        if x.generation <= 1 or seen is None:
            return self._policy.first_step_limit_s
        return min(self._policy.first_step_limit_s, max(_AGAIN_FLOOR_S, _AGAIN_FACTOR * seen))
