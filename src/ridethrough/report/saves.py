"""What a run's `save` events say about its checkpoints: newest per tier, freshness, rollback distance, backlog."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ridethrough.ledger.reading import Event

# What a state has come to -> where it is from then on.
TIERS = {"staged": "memory", "held": "memory", "replicated": "peer", "committed": "disk"}
PROMISED = ("every", "step_s", "snapshot_s", "replica_s", "node_loss_steps")


@dataclass(frozen=True)
class Tier:
    """The newest state in one tier: finished steps in it, its age, and how many steps a rollback to it would lose."""

    step: int
    age_s: float
    rollback_steps: int
    bytes: int | None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}


@dataclass
class Saves:
    """All saves of a run. `write_s`, `interval_s`: seconds each committed save took to write, and from one committed
    save to the next. `backlog` are steps that are staged and neither written, superseded nor failed. `host_bytes`:
    memory of all nodes that snapshots take; `backlog_bytes`: of saves that wait for storage, of all nodes."""

    tiers: dict[str, Tier] = field(default_factory=dict)
    num_committed: int = 0
    num_superseded: int = 0
    num_failed: int = 0
    write_s: list[float] = field(default_factory=list)
    interval_s: list[float] = field(default_factory=list)
    interval_steps: list[int] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    backlog: list[int] = field(default_factory=list)
    backlog_age_s: float = 0.0
    bytes: int | None = None
    host_bytes: int | None = None
    backlog_bytes: int | None = None
    promise: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "promise": self.promise,
            "tiers": {name: tier.as_json() for name, tier in self.tiers.items()},
            "num_committed": self.num_committed,
            "num_superseded": self.num_superseded,
            "num_failed": self.num_failed,
            "write_p50_s": middle(self.write_s),
            "write_max_s": max(self.write_s, default=None),
            "interval_p50_s": middle(self.interval_s),
            "backlog": len(self.backlog),
            "backlog_age_s": self.backlog_age_s,
            "backlog_bytes": self.backlog_bytes,
            "host_bytes": self.host_bytes,
            "bytes": self.bytes,
        }


def saves(events: Iterable[Event], *, now_ns: int, step: int) -> Saves:
    """`now_ns`: on the run's clock; `step`: the newest finished step."""
    found = Saves()
    newest: dict[str, Event] = {}
    staged: dict[int, int] = {}  # step -> when
    settled: dict[str, set[tuple[int, str]]] = {"committed": set(), "superseded": set(), "failed": set()}
    committed: dict[int, int] = {}  # step -> when
    begins: dict[tuple[int, int], int] = {}
    memory: dict[str, Event] = {}  # host -> newest
    for event in events:
        if event["kind"] == "phase" and event.get("phase") == "save":
            key = (event.get("generation", 0), event.get("rank", 0))
            if event.get("edge") == "begin":
                begins[key] = event["t_ns"]
            elif key in begins:
                found.stall_s.append((event["t_ns"] - begins.pop(key)) / 1e9)
        if event["kind"] == "memory":
            newest["held"] = event
            if event.get("replicated"):
                newest["replicated"] = event
        if event["kind"] == "host_memory":
            memory[str(event.get("host"))] = event
        if event["kind"] == "promise":
            found.promise = {name: event.get(name) for name in PROMISED}
        if event["kind"] != "save" or not isinstance(event.get("step"), int) or "event" not in event:
            continue
        what, at, t_ns = event["event"], event["step"], event["t_ns"]
        if what == "staged":
            staged.setdefault(at, t_ns)
            newest[what] = event
        elif what in settled:
            staged.pop(at, None)
            settled[what].add((at, str(event.get("attempt") or event.get("path") or event.get("generation"))))
            if what == "committed":
                if at not in committed:
                    if event.get("seconds") is not None:
                        found.write_s.append(float(event["seconds"]))
                    found.bytes = event.get("bytes") or found.bytes
                committed.setdefault(at, t_ns)
                newest[what] = event
    if memory:
        found.host_bytes = sum(event["bytes"] for event in memory.values())
        found.backlog_bytes = sum(event["queued_bytes"] for event in memory.values())
    for what, event in sorted(newest.items(), key=lambda item: item[1]["t_ns"]):
        age_s = max(0, now_ns - event["t_ns"]) / 1e9
        found.tiers[TIERS[what]] = Tier(event["step"], age_s, max(0, step - event["step"]), event.get("bytes"))
    times = sorted(committed.items(), key=lambda item: item[1])
    found.interval_s = [(b[1] - a[1]) / 1e9 for a, b in itertools.pairwise(times)]
    found.interval_steps = [b[0] - a[0] for a, b in itertools.pairwise(times) if b[0] > a[0]]
    found.num_committed = len(committed)
    found.num_superseded = len({at for at, _ in settled["superseded"]})
    found.num_failed = len({at for at, _ in settled["failed"]})
    newest_done = max(committed, default=-1)
    found.backlog = sorted(at for at in staged if at > newest_done)
    if found.backlog:
        found.backlog_age_s = (now_ns - min(staged[at] for at in found.backlog)) / 1e9
    return found


def middle(values: list[float]) -> float | None:
    """The median by nearest rank; None of nothing."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
