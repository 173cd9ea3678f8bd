"""Tells a hung rank from a slow one. Pure: readings and the time go in, verdicts come out.

Progress means steps. A step has a learned deadline; every other phase has a fixed cap. A rank in a phase with a cap of
its own (loading data, saving, evaluating) may rightly be waited for, so its peers are not judged by the step's deadline
until that cap is over. Who is guilty: see `conviction`.

The judge mistrusts itself: its own lateness, and the time that a rank was ready but got no processor, extend every
deadline; a rank that proves healthy doubles them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ridethrough.generation.messages import Situation
from ridethrough.generation.policy import Policy
from ridethrough.health.conviction import convict, place
from ridethrough.health.heartbeat import IN_STEP, Reading

_S = 1_000_000_000
_WINDOW = 200
_LEARN = 8  # steps before the learned deadline is trusted
_LATE_S = 0.25  # a judge that comes later than this was not scheduled, and the ranks were probably not either
_FIRST_FACTOR = 10.0  # what compiles anew is not ten times longer than the longest first step so far
_AGAIN_FLOOR_S, _EARLY_FLOOR_S = 10.0, 60.0  # first step of a later generation; steps before enough are learned
_ALONE_FACTOR = 3.0  # ranks that do not wait for each other: one alone may be late for longer
_SILENT_S = 1.0  # the monitor thread stamps ten times a second, unless something holds the GIL
_MOST_SCALE = 64.0
_BEFORE_MACHINE = 0.8  # the machine kills everybody who has not entered in time: name the guilty before that


@dataclass(frozen=True)
class Verdict:
    """`guilty` hang since `age_s`; the deadline was `deadline_s`. Times in seconds. `situations`: of all ranks."""

    guilty: tuple[int, ...]
    phase: str
    step: int
    age_s: float
    deadline_s: float
    situations: Mapping[int, Situation]


@dataclass(frozen=True)
class _Clock:
    phase: str
    age_s: float
    limit_s: float

    @property
    def overdue(self) -> bool:
        return self.age_s > self.limit_s


class Judge:
    """Judges the ranks of one node (or, with readings of all nodes, of the job). Call `look` several times a second."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._durations: deque[int] = deque(maxlen=_WINDOW)
        self._counted: dict[int, int] = {}
        self._world_size = 0
        self._last_look_ns = 0
        self._absences: deque[tuple[int, int]] = deque(maxlen=_WINDOW)  # (from, to) when the judge was not there
        self._scale = 1.0
        self._marks: dict[int, tuple[tuple[int, int, int], int]] = {}
        self._excused: dict[int, tuple[int, int]] = {}  # rank -> (since when it is in what it is in, time to let off)
        self.longest_s: dict[str, float] = {}

    def step_deadline_s(self) -> float:
        """Learned: factor x 99th percentile of the last 200 steps, not below the floor; by the first steps before."""
        if len(self._durations) < _LEARN:
            return self._by_first_steps_s(_EARLY_FLOOR_S)
        ordered = sorted(self._durations)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] / _S
        return max(self._policy.hang_floor_s, self._policy.hang_factor * p99) * self._scale

    def plan_changed(self, world_size: int) -> None:
        """A generation begins. Another world takes another time: what was learned of the step is forgotten."""
        if world_size != self._world_size:
            self._world_size = world_size
            self._durations.clear()

    def exonerate(self) -> None:
        """The last verdict was wrong, the rank was moving: the step's deadline doubles."""
        self._scale = min(_MOST_SCALE, self._scale * 2)

    def look(self, now_ns: int, readings: Mapping[int, Reading]) -> Verdict | None:
        """`readings` by rank. Returns a verdict as long as somebody is overdue and somebody is guilty."""
        inside = self._inside(readings)
        self._learn(inside)
        if self._last_look_ns and now_ns - self._last_look_ns > _LATE_S * _S:
            self._absences.append((self._last_look_ns, now_ns))
        elif self._last_look_ns:
            self._excuse(now_ns, now_ns - self._last_look_ns, inside)
        self._last_look_ns = now_ns
        clocks = self._clocks(now_ns, inside)
        for clock in clocks.values():
            if clock.phase not in IN_STEP:
                self._seen(clock.phase, clock.age_s)
        if not any(clock.overdue for clock in clocks.values()):
            return None
        situations = self._situations(now_ns, inside, clocks)
        guilty = convict(situations)
        if not guilty:
            return None
        worst = max(guilty, key=lambda rank: (clocks[rank].overdue, clocks[rank].age_s))
        overdue = [clocks[worst]] if clocks[worst].overdue else [c for c in clocks.values() if c.overdue]
        late = max(overdue, key=lambda c: c.age_s - c.limit_s)
        x = inside[worst]
        return Verdict(guilty, x.phase, x.step, late.age_s, late.limit_s, situations)

    def situations(self, now_ns: int, readings: Mapping[int, Reading]) -> dict[int, Situation]:
        """Where the ranks are, for a verdict over several nodes."""
        inside = self._inside(readings)
        return self._situations(now_ns, inside, self._clocks(now_ns, inside))

    @staticmethod
    def _inside(readings: Mapping[int, Reading]) -> dict[int, Reading]:
        return {r: x for r, x in readings.items() if x.generation and x.phase not in ("outside", "held")}

    # --- how late each rank is -----------------------------------------------------------------------------------

    def _clocks(self, now_ns: int, inside: Mapping[int, Reading]) -> dict[int, _Clock]:
        starved_ns = max((self._starved_ns(rank, x) for rank, x in inside.items()), default=0)
        ages = {r: self._age_s(now_ns, r, x, starved_ns) for r, x in inside.items()}
        deadline_s = self.step_deadline_s()
        # Peers that wait for a late rank are late themselves, by up to one step less.
        stepping = [ages[r] for r, x in inside.items() if _phase(x) in IN_STEP]
        waiting = min(stepping, default=0.0) > deadline_s / 2
        step_limit_s = deadline_s if waiting else _ALONE_FACTOR * deadline_s
        return {
            r: _Clock(_phase(x), ages[r], step_limit_s if _phase(x) in IN_STEP else self._cap_s(x))
            for r, x in inside.items()
        }

    def _age_s(self, now_ns: int, rank: int, x: Reading, starved_ns: int) -> float:
        since_ns = _since_ns(x)
        age_ns = now_ns - since_ns - self._absent_ns(since_ns)
        excused_since_ns, excused_ns = self._excused.get(rank, (0, 0))
        if excused_since_ns == since_ns:
            age_ns -= excused_ns
        return (age_ns - min(starved_ns, max(0, age_ns) // 2)) / _S

    def _excuse(self, now_ns: int, passed_ns: int, inside: Mapping[int, Reading]) -> None:
        """Who may wait for a rank that is loading data, saving or evaluating is not the later for it."""
        busy = [
            place(x.step, x.phase)
            for x in inside.values()
            if _phase(x) not in IN_STEP and (now_ns - x.phase_ns) / _S <= self._cap_s(x)
        ]
        for rank, x in inside.items():
            if _phase(x) in IN_STEP and busy and min(busy) <= place(x.step, x.phase):
                since_ns, excused_ns = self._excused.get(rank, (0, 0))
                self._excused[rank] = (_since_ns(x), passed_ns + (excused_ns if since_ns == _since_ns(x) else 0))

    def _absent_ns(self, since_ns: int) -> int:
        """How long the judge itself was away since then: the ranks were probably not running either."""
        return sum(to - max(begun, since_ns) for begun, to in self._absences if to > since_ns)

    def _starved_ns(self, rank: int, x: Reading) -> int:
        """How long the rank has waited for a processor since it last moved on."""
        mark = (x.generation, x.step, x.phase_ns)
        known = self._marks.get(rank)
        if known is None or known[0] != mark:
            self._marks[rank] = (mark, x.delay_ns)
            return 0
        return x.delay_ns - known[1]

    def _situations(
        self, now_ns: int, inside: Mapping[int, Reading], clocks: Mapping[int, _Clock]
    ) -> dict[int, Situation]:
        return {
            r: Situation(
                phase=x.phase,
                step=x.step,
                collectives=x.collectives,
                groups={f"{key:x}": begun for key, begun in x.groups},
                within_cap=clocks[r].phase not in IN_STEP and not clocks[r].overdue,
                overdue=clocks[r].overdue,
                late=clocks[r].age_s > clocks[r].limit_s / 2,
                silent=bool(x.gil_ns) and now_ns - x.gil_ns - self._absent_ns(x.gil_ns) > _SILENT_S * _S,
                since_ns=max(x.step_ns, x.phase_ns),
            )
            for r, x in inside.items()
        }

    # --- what is learned -----------------------------------------------------------------------------------------

    # A process is known from its first reading on: what it did before that is not counted.
    def _learn(self, inside: Mapping[int, Reading]) -> None:
        for rank, x in inside.items():
            fresh = x.num_steps - self._counted.get(rank, x.num_steps)
            self._counted[rank] = x.num_steps
            for duration in x.recent_ns[len(x.recent_ns) - min(fresh, len(x.recent_ns)) :]:
                self._durations.append(duration)
                self._seen("step", duration / _S)

    def _seen(self, phase: str, age_s: float) -> None:
        if age_s > self.longest_s.get(phase, 0.0):
            self.longest_s[phase] = age_s

    def _cap_s(self, x: Reading) -> float:
        p = self._policy
        rebuild_s = _BEFORE_MACHINE * p.rebuild_limit(self._world_size)
        return {
            "recovery": rebuild_s,
            "group": rebuild_s,
            "init": p.init_limit_s,
            "load": p.load_limit_s,
            "first_step": self._first_step_s(x),
            "data": p.data_limit_s,
            "save": p.save_limit_s,
            "eval": p.eval_limit_s,
            "finish": p.finish_limit_s,
        }[_phase(x)]

    def _first_step_s(self, x: Reading) -> float:
        """Compilation may make the very first step long; a later generation's is known from those before."""
        if x.generation <= 1 or "first_step" not in self.longest_s:
            return self._policy.first_step_limit_s
        return self._by_first_steps_s(_AGAIN_FLOOR_S)

    def _by_first_steps_s(self, floor_s: float) -> float:
        longest_s = self.longest_s.get("first_step", 0.0)  # none: over before anybody looked
        return min(self._policy.first_step_limit_s, max(floor_s, _FIRST_FACTOR * longest_s))


def _since_ns(x: Reading) -> int:
    return max(x.step_ns, x.resumed_ns) if x.phase in IN_STEP else x.phase_ns


def _phase(x: Reading) -> str:
    """The phase whose limit counts: within the first step of a generation, whatever part of it, the first step's."""
    return "first_step" if x.phase in IN_STEP and not x.last_step_ns else x.phase
