"""Which ranks are slower than the others: per-rank step and waiting times with a robust outlier score.

    z = (x - median of all ranks) / (1.4826 x median absolute deviation)

(Iglewicz and Hoaglin 1993; 1.4826 makes the deviation that of a normal distribution.) A rank is an outlier with z above
5 where it is also 5 % and 1 ms above the median. Ranks that wait for each other in every step have the same step time,
so look at what each does alone as well: waiting for its loader, its saves, its evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridethrough.ledger.steps import STATE_CODES, Floats, StepTable

Z_LIMIT = 5.0
_LEAST_EXCESS = 0.05
_LEAST_EXCESS_S = 0.001
_FEWEST = 3  # ranks
_PARTS = ("data_wait", "snapshot_stall", "eval")


@dataclass(frozen=True)
class RankTimes:
    """Of one rank, over its last steps: seconds per step (median, 95th percentile), mean seconds per step waiting."""

    rank: int
    num_steps: int
    step_p50_s: float
    step_p95_s: float
    waits_s: dict[str, float]


@dataclass(frozen=True)
class Straggler:
    """`measure` is `step` or a state of `RankTimes.waits_s`; `seconds` per step against the `median_s` of all ranks."""

    rank: int
    measure: str
    seconds: float
    median_s: float
    z: float

    def line(self) -> str:
        return (
            f"rank {self.rank}: {self.measure} {self.seconds * 1e3:.1f} ms a step, "
            f"the median rank {self.median_s * 1e3:.1f} ms (z {min(self.z, 999):.0f})"
        )


def rank_times(steps: Mapping[int, StepTable], last: int | None = 2000) -> list[RankTimes]:
    """Of every rank that finished a step; `last`: how many of its newest steps count (None: all)."""
    return [_rank_times(rank, steps[rank], last) for rank in sorted(steps)]


def stragglers(times: list[RankTimes]) -> list[Straggler]:
    """The outliers, the worst first; none with fewer than three ranks."""
    if len(times) < _FEWEST:
        return []
    found: list[Straggler] = []
    measures = {"step": np.array([t.step_p50_s for t in times])}
    measures |= {name: np.array([t.waits_s[name] for t in times]) for name in _PARTS}
    for name, values in measures.items():
        median, z = float(np.median(values)), robust_z(values)
        excess = values - median
        slow = (z > Z_LIMIT) & (excess > _LEAST_EXCESS * median) & (excess > _LEAST_EXCESS_S)
        for place in np.flatnonzero(slow).tolist():
            found.append(Straggler(times[place].rank, name, float(values[place]), median, float(z[place])))
    return sorted(found, key=lambda s: -s.z)


def robust_z(values: Floats) -> Floats:
    """Of each value; where more than half are equal, infinity for what is above them."""
    deviation = values - np.median(values)
    spread = 1.4826 * float(np.median(np.abs(deviation)))
    if spread > 0:
        return np.asarray(deviation / spread, np.float64)
    return np.where(deviation > 0, np.inf, np.where(deviation < 0, -np.inf, 0.0))


def _rank_times(rank: int, table: StepTable, last: int | None) -> RankTimes:
    first = 0 if last is None else max(0, len(table) - last)
    took = (table.t1_ns[first:] - table.t0_ns[first:]) / 1e9
    begin = int(table.part_end[first - 1]) if first else 0
    state, length = table.part_state[begin:], (table.part_b[begin:] - table.part_a[begin:]) / 1e9
    waits = {name: float(length[state == STATE_CODES[name]].sum()) / len(took) for name in _PARTS}
    p50_s, p95_s = np.percentile(took, [50, 95])
    return RankTimes(rank, len(took), float(p50_s), float(p95_s), waits)
