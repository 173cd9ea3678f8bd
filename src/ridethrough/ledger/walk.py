"""Walks one slot through a job and says what it did at every nanosecond. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate, takewhile

from ridethrough.ledger.history import Generation, Job, injected_ns
from ridethrough.ledger.lane import Interval, Painter, StepPlan
from ridethrough.ledger.reading import Event
from ridethrough.ledger.steps import STATE_NAMES, Steps

PHASE_STATES = {"load": "restore", "eval": "eval", "save": "snapshot_stall"}


def walk_slot(painter: Painter, job: Job, signs: list[int], slot: int, plan: StepPlan | None) -> None:
    """Paint one slot from the painter's cursor, the job's start, to the job's end. Rolled back steps are still
    `step`. `signs`: `first_signs(job)`; `plan`: of the slot's table of steps, if it has one."""
    painter.end_ns = job.end_ns
    enters = _first_enters(job, slot)
    idle = "launch"  # what it is while no training function runs
    for place, generation in enumerate(job.generations):
        painter.ordinal = generation.ordinal
        if generation.ranks is not None and slot not in generation.ranks:
            if generation.plan_ns is not None:
                painter.to(generation.plan_ns, idle)
            idle = "degraded"
            continue
        if idle == "degraded" and generation.plan_ns is not None:
            painter.to(generation.plan_ns, idle)
            idle = "rebuild"
        end_ns = signs[place + 1]
        out = generation.all_out_ns if generation.all_out_ns is not None else job.end_ns
        limit_ns = min(job.end_ns, out, enters[place + 1])
        stays = _live(painter, job, generation, slot, idle, end_ns, limit_ns, plan)
        if generation.declared_ns is not None:
            painter.to(generation.declared_ns, "detect")
            painter.to(end_ns if generation.all_out_ns is None else generation.all_out_ns, "teardown")
            idle = "rebuild"
        elif place + 1 < len(job.generations):
            painter.to(end_ns, stays)
            idle = "rebuild" if generation.first("enter", slot) else idle
        else:
            idle = stays
    painter.to(job.end_ns, idle)


def first_signs(job: Job) -> list[int]:
    """For each place: the first sign of that generation or a later one; the job's end after the last."""
    signs = [g.first_ns for g in job.generations]
    return _running_least([job.end_ns if sign is None else sign for sign in signs], job.end_ns)


def _first_enters(job: Job, slot: int) -> list[int]:
    """The same for when the slot entered: a step that ends later is no step of a member, its next owner is in."""
    enters = [g.first("enter", slot) for g in job.generations]
    return _running_least([job.end_ns if e is None else e["t_ns"] for e in enters], job.end_ns)


def _running_least(times: list[int], end_ns: int) -> list[int]:
    return list(accumulate([end_ns, *reversed(times)], min))[::-1]


def _live(
    painter: Painter,
    job: Job,
    generation: Generation,
    slot: int,
    idle: str,
    end_ns: int,
    limit_ns: int,
    plan: StepPlan | None,
) -> str:
    """Paint what the slot did in the generation until the fault (or `end_ns`); returns the state that goes on."""
    cut = end_ns
    if generation.fault_ns is not None:
        own = injected_ns(generation, slot)
        cut = generation.fault_ns if own is None else min(own, generation.fault_ns)
    events = generation.by_slot.get(slot, [])
    phases = deque(phase_intervals(events))
    steps = generation.steps.get(slot)
    done, total = 0, steps.num_until(limit_ns) if steps is not None else 0
    base = idle
    for event in events:
        kind, t_ns = event["kind"], event["t_ns"]
        if kind not in ("enter", "loop", "finish", "exit"):
            continue
        if steps is not None and done < total and (until := min(total, steps.num_until(t_ns))) > done:
            _steps(painter, plan, steps, done, until, base, phases)
            base, done = "partial_step", until
        if t_ns > cut:
            continue
        if kind == "enter":
            painter.to(t_ns, base)
            base = "init"
        elif kind == "loop":
            painter.fill(t_ns, base, phases)
            base = "partial_step"
        elif kind == "finish" or event.get("code") == 0:
            phases = deque(p for p in phases if p.state != "snapshot_stall")  # the last save belongs to it
            painter.fill(t_ns, "finish" if base == "partial_step" else base, phases)
            base = "finish"
    if steps is not None and done < total:
        _steps(painter, plan, steps, done, total, base, phases)
        base = "partial_step"
    if generation.declared_ns is None:
        died = next((e for e in job.exits if e["rank"] == slot and painter.cursor <= e["t_ns"] < cut), None)
        if died is not None and base not in ("finish", idle):
            painter.fill(died["t_ns"], base, phases)
            return "finish" if died.get("exit_code") == 0 else "unattributed"
    painter.fill(cut, base, phases if base != idle else ())
    return base


def _steps(
    painter: Painter, plan: StepPlan | None, steps: Steps, first: int, last: int, base: str, phases: deque[Interval]
) -> None:
    """Paint steps: where nothing else happens all at once, around a long phase one by one."""
    gap = "unattributed" if base == "partial_step" else base
    while first < last:
        while phases and phases[0].end is not None and phases[0].end <= painter.cursor:
            phases.popleft()
        clear = min(last, steps.num_until(phases[0].begin)) if phases else last
        painted = 0
        if plan is not None and clear > first:
            painted = painter.steps(plan, steps.first + first, steps.first + clear, gap)
        if not painted:
            painter.fill(int(steps.t0_ns[first]), gap, phases)
            painter.fill(int(steps.t1_ns[first]), "step", _carved(steps, first, phases), int(steps.step[first]))
            painted = 1
        first += painted
        gap = "unattributed"


def phase_intervals(events: list[Event]) -> list[Interval]:
    """What one slot did in long phases, in order: from its `phase` events, of which an inner one interrupts the
    outer one, and from `load` events, which are written at their end and say how long they took."""
    loads = [
        Interval("restore", e["t_ns"] - round(e["seconds"] * 1e9), e["t_ns"])
        for e in events
        if e["kind"] == "load" and e.get("seconds")
    ]
    nested = _nested(events)
    return sorted(nested + loads, key=lambda interval: interval.begin) if loads else nested


def _nested(events: list[Event]) -> list[Interval]:
    done: list[Interval] = []
    stack: list[tuple[str, str]] = []  # phase, state
    since = 0
    for event in events:
        phase = event.get("phase")
        if event["kind"] != "phase" or phase not in PHASE_STATES:
            continue
        t_ns = event["t_ns"]
        if stack and t_ns > since:
            done.append(Interval(stack[-1][1], since, t_ns))
        since = t_ns
        if event["edge"] == "begin":
            stack.append((phase, PHASE_STATES[phase]))
        elif any(phase == name for name, _ in stack):
            while stack.pop()[0] != phase:
                pass
    if stack:
        done.append(Interval(stack[-1][1], since, None))
    return done


def _carved(steps: Steps, row: int, phases: Iterable[Interval]) -> list[Interval]:
    """A step's own parts and the phases that lie inside of it; the painter lets the first of two that overlap win."""
    t0, t1 = int(steps.t0_ns[row]), int(steps.t1_ns[row])
    parts = [Interval(STATE_NAMES[state], max(a, t0), min(b, t1)) for state, a, b in steps.parts(row)]
    inside = [p for p in takewhile(lambda p: p.begin < t1, phases) if p.end is None or p.end > t0]
    return sorted(parts + inside, key=lambda p: p.begin) if inside else parts
