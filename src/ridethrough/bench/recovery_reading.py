"""From a workload's events to the measures of one run, by the ledger's own rules, for every mechanism alike.

The workload wrote the workers' half of a ledger. The launchers' half is made here from what the workers saw and when
the kernel ended them, not from any launcher's own words: a fault counts as declared when the first other rank has
left its training function or was ended (the guilty rank's own exception declares nothing, unless it is the only one
who leaves), and all are out when the last rank of that generation has left or was ended. Most of that is often the
survivors' own computing: a rank notices only in a collective or between two steps. `collective_out_s` leaves it out: it
is the slowest of those that stood in a collective already when the fault struck, None if none did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ridethrough.ledger.history import history
from ridethrough.ledger.incidents import history_incidents
from ridethrough.ledger.partition import partition_history
from ridethrough.ledger.reading import Event

_CLASS = {"hang_loop": "hang", "hang_lock": "hang", "hang_skip_collective": "hang", "sigstop": "hang"}
_OF_INCIDENT = ("detected_s", "all_out_s", "first_step_s", "caught_up_s", "steps_lost", "resumed_at")
_BY_KIND = ("exception", "sigkill", "sigsegv", "exit", "hang", "node_loss")


def measures(
    events: list[Event], ended_ns: Mapping[int, int], world_size: int, start_ns: int, end_ns: int
) -> dict[str, Any]:
    """The fields of one result but mechanism, fault and rep; None where the run never got there.

    `events`: `read_events` of the workload's folder. `ended_ns`: process id -> its end. The wall is from `start_ns`,
    when the mechanism was started, to `end_ns`.
    """
    pids = {event["file"]: event["pid"] for event in events if event["kind"] == "header"}
    workers = [event for event in events if event["kind"] not in ("header", "process", "final")]
    workers = _numbered([{**event, "pid": pids[event["file"]]} for event in workers])
    whole = [*workers, *_launcher_events(workers, ended_ns, world_size)]
    whole.append(_event("job_start", start_ns, slots=world_size, nodes=1, run_id="bench"))
    whole.append(_event("job_end", end_ns, code=0, reason="over"))
    past = history(sorted(whole, key=lambda event: int(event["t_ns"])))
    part = partition_history(past)
    found = history_incidents(past)
    out: dict[str, Any] = {
        "training_goodput": part.training_goodput,
        "infrastructure_goodput": part.infrastructure_goodput,
        "wall_s": part.wall_ns / 1e9,
        "step_s": _median_step_s(workers),
        "states_s": {state: ns / 1e9 for state, ns in part.states_ns.items() if ns},
        **dict.fromkeys((*_OF_INCIDENT, "collective_out_s", "load_s")),
        **dict.fromkeys(("attempts", "failed_attempts", "processes_replaced"), 0),
        "stages_s": {},
    }
    fault = next((event for event in workers if event["kind"] == "fault_injected"), None)
    if fault is None:
        return out
    fault_ns = int(fault["t_ns"])
    if found:
        first = found[0]
        for name in (*_OF_INCIDENT, "stages_s"):
            out[name] = getattr(first, name)
        out["load_s"] = first.stages_s.get("restore")
    out["collective_out_s"] = _collective_out_s(workers, fault)
    groups = {event["generation"] for event in workers if event["kind"] == "enter" and event["t_ns"] > fault_ns}
    born = [event for event in events if event["kind"] == "process" and event["t_ns"] > fault_ns]
    out["processes_replaced"] = len(born)
    started = [sum(event["rank"] == rank for event in born) for rank in range(world_size)]
    out["attempts"] = max(len(groups), *started)
    recovered = out["first_step_s"] is not None
    out["failed_attempts"] = out["attempts"] - 1 if recovered and out["attempts"] else out["attempts"]
    return out


def _collective_out_s(workers: list[Event], fault: Event) -> float | None:
    """By the training function's end on each survivor, so with what its error takes to come up to there."""
    took = [
        (int(event["t_ns"]) - int(fault["t_ns"])) / 1e9
        for event in workers
        if event["kind"] == "leave"
        and (event["generation"], event["rank"] != fault["rank"]) == (fault["generation"], True)
        and 0 < (event.get("waiting_ns") or 0) <= fault["t_ns"] <= event["t_ns"]
    ]
    return max(took, default=None)


def final(events: Iterable[Event]) -> tuple[str | None, float | None]:
    """Hash and loss at the end, of the lowest rank that got there."""
    ends = sorted((event for event in events if event["kind"] == "final"), key=lambda event: int(event["rank"]))
    return (ends[0]["final_hash"], ends[0]["final_loss"]) if ends else (None, None)


def _event(kind: str, t_ns: int, **fields: Any) -> Event:
    return {"kind": kind, "t_ns": t_ns, "role": "coordinator", "host": "bench", **fields}


def _numbered(workers: list[Event]) -> list[Event]:
    """Generations as 1, 2, 3 in the order of time. The workload names them by a number that all ranks share; where
    nobody leaves a generation together (torchft: number 0), the survivors' dropped step and the return of the
    lost one begin the next."""
    names = sorted({event["generation"] for event in workers if event["generation"]})
    if not names:
        return _by_participants(workers)
    number = {name: place for place, name in enumerate(names, 1)}
    return [{**event, "generation": number[event["generation"]]} for event in workers if event["generation"] in number]


def _by_participants(workers: list[Event]) -> list[Event]:
    fault = next((event for event in workers if event["kind"] == "fault_injected"), None)
    if fault is None:
        return [{**event, "generation": 1} for event in workers]
    fault_ns, guilty = int(fault["t_ns"]), fault["rank"]
    returned = [e["t_ns"] for e in workers if e["kind"] == "enter" and e["rank"] == guilty and e["t_ns"] > fault_ns]
    steps = [e for e in workers if e["kind"] == "step" and e["rank"] == guilty and e["t_ns"] > fault_ns]
    back_ns = min((int(e["t0_ns"]) for e in steps), default=None)
    out: list[Event] = []
    left: dict[int, int] = {}
    for event in workers:
        t_ns, rank = int(event["t_ns"]), event["rank"]
        if rank == guilty and returned and t_ns >= min(returned):
            out.append({**event, "generation": 3})
        elif event["kind"] == "leave" and rank not in left and t_ns > fault_ns:
            left[rank] = t_ns
            out.append({**event, "generation": 1})
            again = {**event, "generation": 2}
            out += [
                {**again, "kind": "enter", "t_ns": t_ns + 1},
                {**again, "kind": "loop", "t_ns": t_ns + 2, "step": 0},
            ]
        elif event["kind"] != "leave":
            back = back_ns is not None and t_ns > back_ns and rank in left
            out.append({**event, "generation": (3 if back else 2) if rank in left else 1})
    return out


def _launcher_events(workers: list[Event], ended_ns: Mapping[int, int], world_size: int) -> list[Event]:
    """Plans, and for each generation that did not finish its fault and the moment when all were out."""
    out: list[Event] = []
    numbers = sorted({event["generation"] for event in workers})
    for number in numbers:
        own = [event for event in workers if event["generation"] == number]
        ranks = sorted({event["rank"] for event in own})
        members = [{"rank": rank, "local_rank": rank, "node": 0, "worker": "", "pid": 0} for rank in ranks]
        out.append(
            _event(
                "plan", own[0]["t_ns"], generation=number, epoch=0, world_size=world_size, members=members, resume={}
            )
        )
        if number == numbers[-1] and any(event["kind"] == "finish" for event in own):
            continue
        out += _fault_events(own, ended_ns)
    return out


def _fault_events(own: list[Event], ended_ns: Mapping[int, int]) -> list[Event]:
    injected = next((event for event in own if event["kind"] == "fault_injected"), None)
    fault_ns = int(injected["t_ns"]) if injected is not None else 0
    guilty = injected["rank"] if injected is not None else None
    out_ns: dict[int, int] = {}  # rank -> when it was out
    for event in own:
        if event["kind"] == "leave" and event["t_ns"] >= fault_ns:
            out_ns.setdefault(event["rank"], int(event["t_ns"]))
    for rank, pid in {event["rank"]: event["pid"] for event in own}.items():
        gone = ended_ns.get(pid)
        if gone is not None and gone >= fault_ns:
            out_ns.setdefault(rank, gone)
    if not out_ns:
        return []
    others = [t_ns for rank, t_ns in out_ns.items() if rank != guilty]
    declared_ns = min(others or out_ns.values())
    kind = str(injected["fault_kind"]) if injected is not None else "exception"
    name = _CLASS.get(kind, kind if kind in _BY_KIND else "exception")
    where = {"class": name, "rank": guilty if guilty is not None else min(out_ns, key=lambda rank: out_ns[rank])}
    generation = own[0]["generation"]
    report = {"generation": generation, "phase": "forward", "step": None, "detected_by": "user", "fault_ns": None}
    return [
        _event("fault", declared_ns, **report, **where, worker="", cause=kind, root=True, pid=0),
        _event("all_out", max(out_ns.values()), generation=generation),
    ]


def _median_step_s(workers: list[Event]) -> float | None:
    """Of rank 0's steps; the first of each generation is left out."""
    steps = [event for event in workers if event["kind"] == "step" and event["rank"] == 0]
    first = {min(e["t_ns"] for e in steps if e["generation"] == g) for g in {e["generation"] for e in steps}}
    took = sorted((e["t1_ns"] - e["t0_ns"]) / 1e9 for e in steps if e["t_ns"] not in first)
    return took[len(took) // 2] if took else None
