"""Time-outs from the longest seen of each phase, over one run or several of the same kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridethrough.generation.policy import Policy
from ridethrough.ledger.history import Generation
from ridethrough.ledger.steps import STATE_CODES
from ridethrough.ledger.summary import RunLedger
from ridethrough.ledger.walk import phase_intervals

FACTOR = 3.0
_FLOOR_S = 30.0
_LONGEST = 200  # waits for data that count, of each rank
_SETTING = {
    "init": "init_limit_s",
    "load": "load_limit_s",
    "first_step": "first_step_limit_s",
    "data": "data_limit_s",
    "save": "save_limit_s",
    "eval": "eval_limit_s",
    "finish": "finish_limit_s",
}


@dataclass(frozen=True)
class TimeLimit:
    """`longest_s` of `count` times that the phase was seen; `setting` is the policy's name for its limit, `now_s` that
    limit's default and `proposed_s` what these runs support."""

    phase: str
    count: int
    p99_s: float
    longest_s: float
    setting: str
    now_s: float
    proposed_s: float
    formula: str

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}


def time_limits(ledgers: Sequence[RunLedger]) -> list[TimeLimit]:
    """One row per phase that was seen. Times of generations that a fault cut off count only where they were whole."""
    seen: dict[str, list[float]] = {}
    for ledger in ledgers:
        for generation in ledger.past.generations:
            for phase, seconds in _generation(generation):
                seen.setdefault(phase, []).append(seconds)
        for table in ledger.steps.values():
            waits = table.part_state == STATE_CODES["data_wait"]
            if waits.any():
                took_ns = table.part_b[waits] - table.part_a[waits]
                longest = np.partition(took_ns, -_LONGEST)[-_LONGEST:] if len(took_ns) > _LONGEST else took_ns
                seen.setdefault("data", []).extend((longest / 1e9).tolist())
    rows = [_row(phase, seen[phase]) for phase in _SETTING if phase in seen]
    steps = [
        ((t.t1_ns - t.t0_ns) / 1e9).astype(np.float32) for ledger in ledgers for t in ledger.steps.values() if len(t)
    ]
    return [*rows, *([_step_row(np.concatenate(steps))] if steps else [])]


def proposed_policy(limits: Sequence[TimeLimit]) -> dict[str, float]:
    """Setting -> seconds, as `ridethrough run --policy` reads it; a step's deadline is learned, and so not in it."""
    return {limit.setting: limit.proposed_s for limit in limits if limit.phase in _SETTING}


def unseen(limits: Sequence[TimeLimit]) -> list[str]:
    """The phases with a limit of their own that no row is of."""
    seen = {limit.phase for limit in limits}
    return [phase for phase in _SETTING if phase not in seen]


def _generation(generation: Generation) -> Iterable[tuple[str, float]]:
    for slot, events in generation.by_slot.items():
        enter = next((e["t_ns"] for e in events if e["kind"] == "enter"), None)
        loop = next((e["t_ns"] for e in events if e["kind"] == "loop"), None)
        for state, begin, end in phase_intervals(events):
            if end is not None:
                yield {"restore": "load", "snapshot_stall": "save"}.get(state, state), (end - begin) / 1e9
        if enter is not None and loop is not None:
            yield "init", (loop - enter) / 1e9
        steps = generation.steps.get(slot)
        if steps is not None and loop is not None:
            yield "first_step", (int(steps.t1_ns[0]) - loop) / 1e9
        finish = next((e["t_ns"] for e in events if e["kind"] == "finish"), None)
        ended = next((e["t_ns"] for e in events if e["kind"] == "exit"), None)
        if finish is not None and ended is not None:
            yield "finish", (ended - finish) / 1e9


def _row(phase: str, seconds: list[float]) -> TimeLimit:
    longest, setting = max(seconds), _SETTING[phase]
    proposed = _round_up(max(_FLOOR_S, FACTOR * longest))
    p99 = float(np.percentile(seconds, 99))
    now_s = float(getattr(Policy(), setting))
    return TimeLimit(
        phase, len(seconds), p99, longest, setting, now_s, proposed, f"max({_FLOOR_S:g} s, {FACTOR:g} x longest)"
    )


def _step_row(took: np.ndarray[Any, Any]) -> TimeLimit:
    """The step's deadline is learned while the job runs; here is what it would be, and the factor that the longest
    step needs."""
    policy = Policy()
    p99, longest = float(np.percentile(took, 99)), float(took.max())
    proposed = max(policy.hang_floor_s, policy.hang_factor * p99)
    needs = longest / p99 if p99 else 0.0
    formula = (
        f"max({policy.hang_floor_s:g} s, {policy.hang_factor:g} x p99), learned; the longest step is {needs:.1f} x p99"
    )
    return TimeLimit("step", len(took), p99, longest, "hang_factor", proposed, proposed, formula)


def _round_up(seconds: float) -> float:
    """To two digits that one would write."""
    power = 10.0 ** max(0, len(str(int(seconds))) - 2)
    return float(-(-seconds // power) * power)
