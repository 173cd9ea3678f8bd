"""Incidents: what failed, how long each part of the recovery took, and what was lost. Pure, from the events alone.

Every `*_s` counts from the fault. The six stages add up to `first_step_s` to the nanosecond: they follow the rank
whose first step in the new generation was done last, since the job goes on only with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ridethrough.ledger.history import Generation, History, history, injected_faults, root_fault
from ridethrough.ledger.reading import Event
from ridethrough.ledger.steps import SplitEvents, Steps
from ridethrough.ledger.walk import phase_intervals


@dataclass(frozen=True)
class Incident:
    """One fault and its recovery. Seconds; None: it has not happened (yet). `fault_ns` is on the run's clock."""

    id: str
    class_: str
    rank: int | None
    host: str | None
    phase: str | None
    step: int | None
    generation: int
    rung: str | None  # None: undecided, the run ended or goes on
    attempts: int
    detected_by: str | None
    stages_s: dict[str, float]
    detected_s: float
    all_out_s: float | None
    first_step_s: float | None
    caught_up_s: float | None
    resumed_at: int | None
    steps_lost: int | None
    root_cause: str | None
    injected: list[str] = field(default_factory=list)  # ids of the planned faults that it is of; empty: a real one
    secondary: list[dict[str, Any]] = field(default_factory=list)
    job: int = 0
    fault_ns: int = 0
    resumed_generation: int | None = None

    @property
    def recovered(self) -> bool:
        return self.first_step_s is not None

    @property
    def cost_s(self) -> float | None:
        """What it cost every rank: from the fault until the lost steps were done again (as far as it is known)."""
        return self.caught_up_s if self.caught_up_s is not None else self.first_step_s

    def as_json(self) -> dict[str, Any]:
        """The fields of the commands' JSON (`class_` is `class`)."""
        data = asdict(self)
        return {"id": data.pop("id"), "class": data.pop("class_"), **data}


def place(phase: str | None, step: int | None) -> str:
    """For people: `forward of step 8`, or what of it is known."""
    return " of ".join([*([phase] if phase else []), *([f"step {step}"] if step is not None else [])]) or "-"


def incidents(events: Iterable[Event] | SplitEvents, end_ns: int | None = None) -> list[Incident]:
    """All incidents in the order of their faults. Raises LedgerError as `history` does."""
    return history_incidents(history(events, end_ns))


def history_incidents(past: History) -> list[Incident]:
    """The same from an already sorted history."""
    found: list[Incident] = []
    past.generations  # noqa: B018 (numbers them)
    first_ordinal = 0
    for job in past.jobs:
        for group in _groups(job.generations):
            after = job.generations[group[-1].ordinal + 1 - first_ordinal :]
            found.append(_incident(group, after))
        first_ordinal += len(job.generations)
    return found


def _groups(generations: Sequence[Generation]) -> list[list[Generation]]:
    """Generations that ended by a fault, together with those that fell over before their first step for it."""
    groups: list[list[Generation]] = []
    for generation in generations:
        if generation.declared_ns is None:
            continue
        if groups and _same(groups[-1], generation):
            groups[-1].append(generation)
        else:
            groups.append([generation])
    return groups


def _same(group: list[Generation], generation: Generation) -> bool:
    ids = [g.incident["id"] for g in group if g.incident is not None]
    if ids and generation.incident is not None:
        return bool(ids[-1] == generation.incident["id"])
    return generation.number == group[-1].number + 1 and not generation.steps


def _incident(group: list[Generation], after: list[Generation]) -> Incident:
    first = group[0]
    assert first.declared_ns is not None and first.fault_ns is not None
    fault_ns = first.fault_ns
    said = next((g.incident for g in group if g.incident is not None), None)
    decided = next((g.incident for g in reversed(group) if g.incident is not None), None)
    root: Event = said if said is not None else root_fault(first.faults)
    cause = root.get("root_cause") if said is not None else root.get("cause")
    resumed = next((g for g in after if g.steps), None)
    timing = _timing(first, resumed)
    reached = _reached(first)
    resumed_at = _resumed_at(resumed, after)
    return Incident(
        id=str(said["id"]) if said is not None else f"open-{first.job}-{first.number}",
        class_=str(root.get("class")),
        rank=first.guilty,
        host=root.get("host"),
        phase=root.get("phase"),
        step=root.get("step"),
        generation=first.number,
        rung=decided["rung"] if decided is not None else None,
        attempts=max(len(group), int(decided["attempts"]) if decided is not None else 0),
        detected_by=root.get("detected_by"),
        stages_s={stage: ns / 1e9 for stage, ns in timing.items()},
        detected_s=(first.declared_ns - fault_ns) / 1e9,
        all_out_s=_since(fault_ns, first.all_out_ns),
        first_step_s=sum(timing.values()) / 1e9 if "first_step" in timing else None,
        caught_up_s=_since(fault_ns, _caught_up_ns(reached, resumed, after)),
        resumed_at=resumed_at,
        steps_lost=None if resumed_at is None else max(0, reached - resumed_at),
        root_cause=cause,
        injected=[str(event["id"]) for g in group for slot in g.by_slot for event in injected_faults(g, slot)],
        secondary=list(root.get("secondary") or []) if said is not None else _secondary(first, root),
        job=first.job,
        fault_ns=fault_ns,
        resumed_generation=resumed.number if resumed is not None else None,
    )


def _since(fault_ns: int, t_ns: int | None) -> float | None:
    return None if t_ns is None else (t_ns - fault_ns) / 1e9


def _secondary(generation: Generation, root: Event) -> list[dict[str, Any]]:
    others = [event for event in generation.faults if event is not root]
    return [{"rank": e.get("rank"), "class": e.get("class"), "cause": e.get("cause")} for e in others]


def _timing(first: Generation, resumed: Generation | None) -> dict[str, int]:
    """Stages in ns, as far as they were reached."""
    assert first.declared_ns is not None and first.fault_ns is not None
    stages = {"detect": first.declared_ns - first.fault_ns}
    if first.all_out_ns is None:
        return stages
    stages["teardown"] = first.all_out_ns - first.declared_ns
    if resumed is None:
        return stages
    slot = max(resumed.steps, key=lambda slot: int(resumed.steps[slot].t1_ns[0]))
    step, enter, loop = resumed.steps[slot], resumed.first("enter", slot), resumed.first("loop", slot)
    begin = int(loop["t_ns"]) if loop is not None else int(step.t0_ns[0])
    called = max(int(enter["t_ns"]) if enter is not None else begin, first.all_out_ns)
    restore = _restore_ns(resumed.by_slot.get(slot, []), called, begin)
    stages["rebuild"] = called - first.all_out_ns
    stages["init"] = begin - called - restore
    stages["restore"] = restore
    stages["first_step"] = int(step.t1_ns[0]) - begin
    return stages


def _restore_ns(events: list[Event], from_ns: int, to_ns: int) -> int:
    cursor, total = from_ns, 0
    for state, begin, end in phase_intervals(events):
        if state == "restore":
            begin, end = max(begin, cursor), to_ns if end is None else min(end, to_ns)
            total += max(0, end - begin)
            cursor = max(cursor, end)
    return total


def _reached(generation: Generation) -> int:
    """The last finished step of any rank before the fault."""
    out_ns = generation.all_out_ns
    done = [_highest(steps, out_ns) for steps in generation.steps.values()]
    return max([step for step in done if step is not None], default=generation.base or 0)


def _resumed_at(resumed: Generation | None, after: list[Generation]) -> int | None:
    if resumed is not None:
        return resumed.base
    return next((g.base for g in reversed(after) if g.base is not None), None)


def _caught_up_ns(reached: int, resumed: Generation | None, after: list[Generation]) -> int | None:
    """When the last step done before the fault was done again; the first step if none was lost."""
    if resumed is None or resumed.base is None:
        return None
    target = max(reached, resumed.base + 1) if resumed.base >= reached else reached
    for generation in after:
        ends = [end for steps in generation.steps.values() for end in steps.t1_ns[steps.step == target].tolist()]
        if ends:
            return int(max(ends))
    return None


def _highest(steps: Steps, until_ns: int | None) -> int | None:
    count = len(steps) if until_ns is None else steps.num_until(until_ns)
    return int(np.max(steps.step[:count])) if count else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` per cent of them do not exceed. Needs one value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def by_class(found: Sequence[Incident]) -> dict[str, dict[str, Any]]:
    """Per class (and `all`): count, recovery rate, and p50, p95, p99, max of the seconds to the first new step."""
    table: dict[str, dict[str, Any]] = {}
    for name in [*sorted({i.class_ for i in found}), "all"]:
        members = [i for i in found if name in (i.class_, "all")]
        times = [i.first_step_s for i in members if i.first_step_s is not None]
        if members:
            quantiles = {f"p{p}_s": percentile(times, p) if times else None for p in (50, 95, 99)}
            recovered = len(times) / len(members)
            table[name] = {
                "count": len(members),
                "recovery_rate": recovered,
                **quantiles,
                "max_s": max(times, default=None),
            }
    return table
