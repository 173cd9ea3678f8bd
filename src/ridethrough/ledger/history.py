"""Sorts a run's events into jobs and generations, and settles when each generation's fault happened. Pure.

A run folder may hold several jobs (the command was given again). Inside a job, generations follow each other; what
a worker says belongs to the generation that its event names, whenever the line was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ridethrough.ledger.reading import Event, LedgerError

RESUMING = ("resumed", "load")  # kinds whose `step` is that of the state that was loaded
_DEATHS = ("sigkill", "sigsegv", "signal", "exit", "node_loss")
_ROOT_ORDER = (*_DEATHS, "oom", "gpu", "hang", "corruption", "preemption", "exception", "collective")


@dataclass
class Generation:
    """One generation of one job. Times in ns of the run's clock; None: it did not happen or nobody said."""

    job: int
    number: int
    plan_ns: int | None = None
    ranks: frozenset[int] | None = None  # None: no plan was written (a process without launcher)
    by_slot: dict[int, list[Event]] = field(default_factory=dict)  # each in the order of `moment_ns`
    faults: list[Event] = field(default_factory=list)
    incident: Event | None = None
    guilty: int | None = None
    fault_ns: int | None = None  # when it happened, at most declared_ns
    declared_ns: int | None = None
    all_out_ns: int | None = None
    base: int | None = None  # finished steps that it started from

    @property
    def first_ns(self) -> int | None:
        """The first sign of it."""
        times = [moment_ns(events[0]) for events in self.by_slot.values()]
        return min([*times, *([self.plan_ns] if self.plan_ns is not None else [])], default=None)

    def steps(self, slot: int | None = None) -> list[Event]:
        """Finished steps, of one slot or of all."""
        slots = list(self.by_slot) if slot is None else [slot]
        return [e for s in slots for e in self.by_slot.get(s, ()) if e["kind"] == "step"]

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

    @property
    def generations(self) -> list[Generation]:
        return [generation for job in self.jobs for generation in job.generations]


def moment_ns(event: Event) -> int:
    """When it happened: a step ends at `t1_ns`, which is a little before its line was written."""
    return int(event["t1_ns"]) if event["kind"] == "step" else int(event["t_ns"])


def history(events: Iterable[Event], end_ns: int | None = None) -> History:
    """Jobs and generations of the events. `end_ns`: until when to count a job that has no `job_end` (live figures);
    its last event if None. Raises LedgerError when there is no event at all."""
    events = sorted(events, key=lambda event: event["t_ns"])
    if not events:
        raise LedgerError("there are no events yet: no wall time to divide")
    starts = [e["t_ns"] for e in events if e["kind"] == "job_start"] or [events[0]["t_ns"]]
    shares: list[list[Event]] = [[] for _ in starts]
    for event in events:
        shares[max(0, bisect_right(starts, event["t_ns"]) - 1)].append(event)
    jobs = [
        _job(index, start, share, end_ns if index == len(starts) - 1 else None)
        for index, (start, share) in enumerate(zip(starts, shares, strict=True))
    ]
    slots = _num_slots(events)
    if slots < 1:
        raise LedgerError("no event names a rank: no slot to divide the time of")
    return History(slots, jobs)


def _num_slots(events: Sequence[Event]) -> int:
    named = [int(e["slots"]) for e in events if e["kind"] == "job_start"]
    planned = [int(e["world_size"]) for e in events if e["kind"] == "plan"]
    ranks = [e["rank"] + 1 for e in events if _is_slot_event(e)]
    return max([*named, *planned, *ranks], default=0)


def _is_slot_event(event: Event) -> bool:
    """Written by a worker about its own slot. Reports about a rank come from launchers, saves also from keepers."""
    return (
        isinstance(event.get("rank"), int)
        and event["rank"] >= 0
        and isinstance(event.get("generation"), int)
        and event["kind"] not in ("fault", "incident", "save")
        and event.get("role") in (None, "worker")
    )


def _job(index: int, start_ns: int, events: list[Event], end_ns: int | None) -> Job:
    ends = [e["t_ns"] for e in events if e["kind"] == "job_end"]
    last = max(e["t_ns"] for e in events)
    end = ends[-1] if ends else last if end_ns is None else end_ns
    generations: dict[int, Generation] = {}
    exits = []
    for event in events:
        kind, number = event["kind"], event.get("generation")
        if kind == "worker_exit" and isinstance(event.get("rank"), int):
            exits.append(event)
        if not isinstance(number, int):
            continue
        if kind not in ("plan", "fault", "all_out", "incident") and not _is_slot_event(event):
            continue
        _file(generations.setdefault(number, Generation(index, number)), event)
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
    for events in generation.by_slot.values():
        events.sort(key=moment_ns)
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
    first_steps = [events[0]["step"] - 1 for slot in generation.by_slot if (events := generation.steps(slot))]
    return int(min(first_steps)) if first_steps else None


def root_fault(faults: Sequence[Event]) -> Event:
    """The report that caused the others: the one marked so, else died > OOM > hang > exception > collective."""

    def order(event: Event) -> tuple[bool, int, int]:
        name = event.get("class")
        place = _ROOT_ORDER.index(name) if name in _ROOT_ORDER else len(_ROOT_ORDER)
        return (not event.get("root", False), place, event["t_ns"])

    return min(faults, key=order)


def injected_ns(generation: Generation, slot: int | None) -> int | None:
    """The last injected fault of a slot, if the slot finished no step after it."""
    events = generation.by_slot.get(slot, []) if slot is not None else []
    times: list[int] = [e["t_ns"] for e in events if e["kind"] == "fault_injected"]
    out_ns = generation.all_out_ns
    ends = [e["t1_ns"] for e in events if e["kind"] == "step" and (out_ns is None or e["t1_ns"] <= out_ns)]
    last_step = max(ends, default=None)
    return times[-1] if times and (last_step is None or last_step <= times[-1]) else None


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
    signs = [
        moment_ns(e)
        for e in (generation.by_slot.get(guilty, []) if guilty is not None else [])
        if e["kind"] not in ("leave", "exit") and moment_ns(e) <= declared_ns
    ]
    return max(signs, default=declared_ns)


def _all_out_ns(generation: Generation, after: Generation | None) -> int | None:
    if generation.incident is not None and isinstance(generation.incident.get("all_out_ns"), int):
        return int(generation.incident["all_out_ns"])
    left = [e["t_ns"] for events in generation.by_slot.values() for e in events if e["kind"] == "leave"]
    return max(left, default=after.first_ns if after is not None else None)
