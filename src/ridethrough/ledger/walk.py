"""Walks one slot through a job and says what it did at every nanosecond. Pure.

The painter only ever moves forward: what is painted stays, so segments join without gap or overlap by construction,
also when two processes of the slot (a dead one and its replacement) contradict each other by a few microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from ridethrough.ledger.history import Generation, Job, injected_ns, moment_ns
from ridethrough.ledger.reading import Event
from ridethrough.ledger.schema import STATES

PHASE_STATES = {"load": "restore", "eval": "eval", "save": "snapshot_stall"}


class Segment(NamedTuple):
    """`[t0, t1)` in one state; ns of the run's clock. `step` is set for finished steps and what lies inside."""

    state: str
    t0: int
    t1: int
    job: int
    generation: int | None
    step: int | None


class Interval(NamedTuple):
    """A carved-out activity; `end` None: it never ended."""

    state: str
    begin: int
    end: int | None


class Painter:
    """Appends segments from a cursor on; a moment before the cursor paints nothing."""

    def __init__(self, job: int, start_ns: int, end_ns: int) -> None:
        self.segments: list[Segment] = []
        self.cursor = start_ns
        self._end_ns = end_ns
        self._job = job
        self.generation: int | None = None

    def to(self, t_ns: int, state: str, step: int | None = None) -> None:
        t_ns = min(t_ns, self._end_ns)
        if t_ns <= self.cursor:
            return
        last = self.segments[-1] if self.segments else None
        new = Segment(state, self.cursor, t_ns, self._job, self.generation, step)
        if last is not None and (last.state, *last[3:]) == (state, *new[3:]) and state != "step":
            self.segments[-1] = last._replace(t1=t_ns)
        else:
            self.segments.append(new)
        self.cursor = t_ns

    def fill(self, t_ns: int, base: str, carved: Iterable[Interval], step: int | None = None) -> None:
        """Up to `t_ns`: the carved intervals where they lie, `base` in between."""
        for state, begin, end in carved:
            if begin >= t_ns:
                break
            if end is None or end > self.cursor:
                self.to(min(begin, t_ns), base, step)
                self.to(t_ns if end is None else min(end, t_ns), state, step)
        self.to(t_ns, base, step)


def walk_slot(job: Job, index: int, slot: int) -> list[Segment]:
    """Segments of one slot, without gap from the job's start to its end; rolled back steps are still `step`."""
    painter = Painter(index, job.start_ns, job.end_ns)
    idle = "launch"  # what it is while no training function runs
    for place, generation in enumerate(job.generations):
        later = job.generations[place + 1 :]
        painter.generation = generation.number
        if generation.ranks is not None and slot not in generation.ranks:
            if generation.plan_ns is not None:
                painter.to(generation.plan_ns, idle)
            idle = "degraded"
            continue
        if idle == "degraded" and generation.plan_ns is not None:
            painter.to(generation.plan_ns, idle)
            idle = "rebuild"
        end_ns = _end_ns(job, later)
        stays = _live(painter, job, generation, slot, idle, end_ns, _hard_limit(job, generation, later, slot))
        if generation.declared_ns is not None:
            painter.to(generation.declared_ns, "detect")
            painter.to(end_ns if generation.all_out_ns is None else generation.all_out_ns, "teardown")
            idle = "rebuild"
        elif later:
            painter.to(end_ns, stays)
            idle = "rebuild" if generation.first("enter", slot) else idle
        else:
            idle = stays
    painter.to(job.end_ns, idle)
    return painter.segments


def _end_ns(job: Job, later: list[Generation]) -> int:
    """The first sign of a later generation, else the job's end."""
    return min((g.first_ns for g in later if g.first_ns is not None), default=job.end_ns)


def _hard_limit(job: Job, generation: Generation, later: list[Generation], slot: int) -> int:
    """A step that ends later than this is no step of a member: the slot's next owner is in, or all were out."""
    enters = [moment_ns(e) for g in later if (e := g.first("enter", slot)) is not None]
    out = [generation.all_out_ns] if generation.all_out_ns is not None else []
    return min([job.end_ns, *out, *enters])


def _live(painter: Painter, job: Job, generation: Generation, slot: int, idle: str, end_ns: int, limit_ns: int) -> str:
    """Paint what the slot did in the generation until the fault (or `end_ns`); returns the state that goes on."""
    cut = end_ns
    if generation.fault_ns is not None:
        own = injected_ns(generation, slot)
        cut = generation.fault_ns if own is None else min(own, generation.fault_ns)
    events = generation.by_slot.get(slot, [])
    phases = deque(phase_intervals(events))
    base = idle
    for event in events:
        kind, t_ns = event["kind"], moment_ns(event)
        if kind == "step":
            if t_ns <= limit_ns:
                gap = "unattributed" if base == "partial_step" else base
                painter.fill(event["t0_ns"], gap, phases)
                painter.fill(t_ns, "step", _carved(event, phases), event["step"])
                base = "partial_step"
                while phases and phases[0].end is not None and phases[0].end <= painter.cursor:
                    phases.popleft()
        elif t_ns > cut:
            continue
        elif kind == "enter":
            painter.to(t_ns, base)
            base = "init"
        elif kind == "loop":
            painter.fill(t_ns, base, phases)
            base = "partial_step"
        elif kind == "finish" or (kind == "exit" and event.get("code") == 0):
            phases = deque(p for p in phases if p.state != "snapshot_stall")  # the last save belongs to it
            painter.fill(t_ns, "finish" if base == "partial_step" else base, phases)
            base = "finish"
    if generation.declared_ns is None:
        died = next((e for e in job.exits if e["rank"] == slot and painter.cursor <= e["t_ns"] < cut), None)
        if died is not None and base not in ("finish", idle):
            painter.fill(died["t_ns"], base, phases)
            return "finish" if died.get("exit_code") == 0 else "unattributed"
    painter.fill(cut, base, phases if base != idle else ())
    return base


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


def _carved(event: Event, phases: Iterable[Interval]) -> list[Interval]:
    """A step's own parts and the phases that lie inside of it; the painter lets the first of two that overlap win."""
    t0, t1 = event["t0_ns"], event["t1_ns"]
    parts = [
        Interval(state if state in STATES else "unattributed", max(a, t0), min(b, t1))
        for state, a, b in event.get("parts") or ()
    ]
    inside = [p for p in takewhile(lambda p: p.begin < t1, phases) if p.end is None or p.end > t0]
    return sorted(parts + inside, key=lambda p: p.begin) if inside else parts
