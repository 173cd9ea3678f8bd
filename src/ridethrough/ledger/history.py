"""Sorts a run's events into jobs and generations, and settles when each generation's fault happened. Pure.

A run folder may hold several jobs (the command was given again). Inside a job, generations follow each other; what
a worker says belongs to the generation that its event names, whenever the line was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from ridethrough.ledger.reading import Event, LedgerError
from ridethrough.ledger.steps import SplitEvents, Steps, StepTable, split_events

RESUMING = ("resumed", "load")  # kinds whose `step` is that of the state that was loaded
_DEATHS = ("sigkill", "sigsegv", "signal", "exit", "node_loss")
_LAUNCHERS = frozenset(["plan", "fault", "all_out", "incident"])
_NOT_OF_A_SLOT = frozenset(["fault", "incident", "save"])
_ROOT_ORDER = (*_DEATHS, "oom", "gpu", "hang", "corruption", "preemption", "exception", "collective")


@dataclass
class Generation:
    """One generation of one job. Times in ns of the run's clock; None: it did not happen or nobody said."""

    job: int
    number: int
    plan_ns: int | None = None
    ranks: frozenset[int] | None = None  # None: no plan was written (a process without launcher)
    by_slot: dict[int, list[Event]] = field(default_factory=dict)  # without steps, in the order of `t_ns`
    steps: dict[int, Steps] = field(default_factory=dict)  # by slot; none is empty
    faults: list[Event] = field(default_factory=list)
    incident: Event | None = None
    guilty: int | None = None
    fault_ns: int | None = None  # when it happened, at most declared_ns
    declared_ns: int | None = None
    all_out_ns: int | None = None
    base: int | None = None  # finished steps that it started from
    ordinal: int = -1  # its place in `History.generations`

    @property
    def first_ns(self) -> int | None:
        """The first sign of it."""
        times = [int(events[0]["t_ns"]) for events in self.by_slot.values()]
        times += [int(steps.t1_ns[0]) for steps in self.steps.values()]
        return min([*times, *([self.plan_ns] if self.plan_ns is not None else [])], default=None)

    def first(self, kind: str, slot: int) -> Event | None:
        return next((e for e in self.by_slot.get(slot, ()) if e["kind"] == kind), None)


@dataclass
class Job:
    """From one `job_start` to its end: the `job_end` event, else the last event (or the moment asked for)."""

    start_ns: int
    end_ns: int
    ended: bool
    generations: list[Generation]
    exits: list[Event]  # worker_exit


@dataclass
class History:
    """A run: its jobs in order. The wall is from the first job's start to the last job's end."""

    slots: int
    jobs: list[Job]

    @property
    def start_ns(self) -> int:
        return self.jobs[0].start_ns

    @property
    def end_ns(self) -> int:
        return self.jobs[-1].end_ns

    @cached_property
    def generations(self) -> list[Generation]:
        """Of all jobs, in order; a generation's `ordinal` is its place here."""
        found = [generation for job in self.jobs for generation in job.generations]
        for place, generation in enumerate(found):
            generation.ordinal = place
        return found


def history(events: Iterable[Event] | SplitEvents, end_ns: int | None = None) -> History:
    """Jobs and generations of the events. `end_ns`: until when to count a job that has no `job_end` (live figures);
    its last event if None. Raises LedgerError when there is no event at all."""
    split = events if isinstance(events, SplitEvents) else split_events(events)
    rest = split.rest
    if not rest and not split.steps:
        raise LedgerError("there are no events yet: no wall time to divide")
    begins = [*(e["t_ns"] for e in rest[:1]), *(int(table.t1_ns.min()) for table in split.steps.values())]
    starts = [e["t_ns"] for e in rest if e["kind"] == "job_start"] or [min(begins)]
    shares: list[list[Event]] = [[] for _ in starts]
    for event in rest:
        shares[max(0, bisect_right(starts, event["t_ns"]) - 1)].append(event)
    stepped: list[dict[int, list[Steps]]] = [{} for _ in starts]
    for rank, table in split.steps.items():
        for job, steps in _stretches(table, starts):
            stepped[job].setdefault(rank, []).append(steps)
    jobs = [
        _job(index, start, shares[index], stepped[index], end_ns if index == len(starts) - 1 else None)
        for index, start in enumerate(starts)
    ]
    slots = _num_slots(split, jobs)
    if slots < 1:
        raise LedgerError("no event names a rank: no slot to divide the time of")
    return History(slots, jobs)


def _stretches(table: StepTable, starts: list[int]) -> Iterator[tuple[int, Steps]]:
    """The steps of one rank by job and generation, each in the order of time."""
    job = np.maximum(np.searchsorted(np.array(starts, np.int64), table.t1_ns, side="right") - 1, 0)
    same_job = np.diff(job) == 0
    same = same_job & (np.diff(table.generation) == 0)
    rising = (np.diff(job) > 0) | (same_job & (np.diff(table.generation) > 0)) | (same & (np.diff(table.t1_ns) >= 0))
    if not rising.all():
        order = np.lexsort((table.t1_ns, table.generation, job))
        table, job = table.take(order), job[order]
        same = (np.diff(job) == 0) & (np.diff(table.generation) == 0)
    edges = [0, *(np.flatnonzero(~same) + 1).tolist(), len(table)]
    for first, last in pairwise(edges):
        if first < last:
            yield int(job[first]), Steps(table, first, last)


def _num_slots(split: SplitEvents, jobs: list[Job]) -> int:
    named = [int(e["slots"]) for e in split.rest if e["kind"] == "job_start"]
    planned = [int(e["world_size"]) for e in split.rest if e["kind"] == "plan"]
    seen = [rank + 1 for job in jobs for generation in job.generations for rank in generation.by_slot]
    return max([*named, *planned, *seen, *(rank + 1 for rank in split.steps)], default=0)


def _is_slot_event(event: Event) -> bool:
    """Written by a worker about its own slot. Reports about a rank come from launchers, saves also from keepers."""
    rank = event.get("rank")
    return (
        isinstance(rank, int)
        and rank >= 0
        and isinstance(event.get("generation"), int)
        and event["kind"] not in _NOT_OF_A_SLOT
        and event.get("role") in (None, "worker")
    )


def _job(index: int, start_ns: int, events: list[Event], stepped: dict[int, list[Steps]], end_ns: int | None) -> Job:
    ends = [e["t_ns"] for e in events if e["kind"] == "job_end"]
    times = [e["t_ns"] for e in events[-1:]] + [int(s.t1_ns[-1]) for each in stepped.values() for s in each]
    end = ends[-1] if ends else max(times, default=start_ns) if end_ns is None else end_ns
    generations: dict[int, Generation] = {}
    exits = []
    for event in events:
        kind, number = event["kind"], event.get("generation")
        if kind == "worker_exit" and isinstance(event.get("rank"), int):
            exits.append(event)
        if not isinstance(number, int):
            continue
        if kind not in _LAUNCHERS and not _is_slot_event(event):
            continue
        generation = generations.get(number)
        if generation is None:
            generation = generations[number] = Generation(index, number)
        _file(generation, event)
    for rank, each in stepped.items():
        for steps in each:
            number = int(steps.table.generation[steps.first])
            generations.setdefault(number, Generation(index, number)).steps[rank] = steps
    ordered = [generations[number] for number in sorted(generations)]
    for place, generation in enumerate(ordered):
        _settle(generation, next(iter(ordered[place + 1 :]), None))
    return Job(start_ns, max(end, start_ns), bool(ends), ordered, exits)


def _file(generation: Generation, event: Event) -> None:
    kind = event["kind"]
    if kind == "plan":
        generation.plan_ns = event["t_ns"]
        generation.ranks = frozenset(member["rank"] for member in event["members"])
    elif kind == "fault":
        generation.faults.append(event)
    elif kind == "all_out":
        generation.all_out_ns = event["t_ns"]
    elif kind == "incident":
        generation.incident = event
    else:
        generation.by_slot.setdefault(event["rank"], []).append(event)


def _settle(generation: Generation, after: Generation | None) -> None:
    generation.base = _base(generation)
    incident = generation.incident
    ending = [e for e in generation.faults if _has_rank(e)] or (generation.faults if _ended(generation) else [])
    if ending:
        generation.declared_ns = ending[0]["t_ns"]
    elif incident is not None:
        generation.declared_ns = incident["declared_ns"]
    if generation.declared_ns is None:
        return
    generation.guilty = incident["rank"] if incident is not None else root_fault(generation.faults).get("rank")
    if generation.all_out_ns is None:
        generation.all_out_ns = _all_out_ns(generation, after)
    if generation.all_out_ns is not None:
        generation.all_out_ns = max(generation.all_out_ns, generation.declared_ns)
    generation.fault_ns = min(_fault_ns(generation, generation.declared_ns), generation.declared_ns)


def _ended(generation: Generation) -> bool:
    """The launcher has called everyone out. Without that, the death of a spare (no rank) ends nothing."""
    return generation.incident is not None or generation.all_out_ns is not None


def _has_rank(event: Event) -> bool:
    return isinstance(event.get("rank"), int) and event["rank"] >= 0


def _base(generation: Generation) -> int | None:
    resumed = [e["step"] for events in generation.by_slot.values() for e in events if e["kind"] in RESUMING]
    if resumed:
        return int(min(resumed))
    return min((int(steps.step[0]) - 1 for steps in generation.steps.values()), default=None)


def root_fault(faults: Sequence[Event]) -> Event:
    """The report that caused the others: the one marked so, else died > OOM > hang > exception > collective."""

    def order(event: Event) -> tuple[bool, int, int]:
        name = event.get("class")
        place = _ROOT_ORDER.index(name) if name in _ROOT_ORDER else len(_ROOT_ORDER)
        return (not event.get("root", False), place, event["t_ns"])

    return min(faults, key=order)


def injected_faults(generation: Generation, slot: int) -> list[Event]:
    """The injected faults of a slot that it finished no step after, in the order of time."""
    shots = [e for e in generation.by_slot.get(slot, ()) if e["kind"] == "fault_injected"]
    last_step = _last_end_ns(generation, slot, generation.all_out_ns) if shots else None
    return [e for e in shots if last_step is None or last_step <= e["t_ns"]]


def injected_ns(generation: Generation, slot: int | None) -> int | None:
    """When the last of them struck."""
    shots = injected_faults(generation, slot) if slot is not None else []
    return int(shots[-1]["t_ns"]) if shots else None


def _last_end_ns(generation: Generation, slot: int | None, until_ns: int | None) -> int | None:
    """When a slot's last step until a moment (None: of all) ended."""
    steps = generation.steps.get(slot) if slot is not None else None
    count = 0 if steps is None else len(steps) if until_ns is None else steps.num_until(until_ns)
    return None if steps is None or not count else int(steps.t1_ns[count - 1])


def _fault_ns(generation: Generation, declared_ns: int) -> int:
    """The injector's event, else what the detector knew, else the guilty rank's last sign, else the declaration."""
    guilty = generation.guilty
    known = injected_ns(generation, guilty)
    if known is not None:
        return known
    reports = [generation.incident] if generation.incident is not None else []
    for report in [*reports, *(e for e in generation.faults if e.get("rank") == guilty)]:
        if isinstance(report.get("fault_ns"), int):
            return int(report["fault_ns"])
    events = generation.by_slot.get(guilty, []) if guilty is not None else []
    signs = [e["t_ns"] for e in events if e["kind"] not in ("leave", "exit") and e["t_ns"] <= declared_ns]
    last_step = _last_end_ns(generation, guilty, declared_ns)
    return max([*signs, *([last_step] if last_step is not None else [])], default=declared_ns)


def _all_out_ns(generation: Generation, after: Generation | None) -> int | None:
    if generation.incident is not None and isinstance(generation.incident.get("all_out_ns"), int):
        return int(generation.incident["all_out_ns"])
    left = [e["t_ns"] for events in generation.by_slot.values() for e in events if e["kind"] == "leave"]
    return max(left, default=after.first_ns if after is not None else None)
