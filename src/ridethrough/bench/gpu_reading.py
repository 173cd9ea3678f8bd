"""From the ledgers of the jobs of `ridethrough bench gpu` to rows. Seconds count from the moment before the fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ridethrough.ledger.incidents import incidents
from ridethrough.ledger.reading import Event

_NOTED = ("pid", "threads", "python_threads", "fds", "allocated_bytes", "reserved_bytes", "device_bytes")


def notes(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What the job noted at each entry, in order."""
    found = [event for event in events if event["kind"] == "note"]
    return [{name: note[name] for name in _NOTED if name in note} for note in found]


def failures(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """One row for each fault that fired: the moments of its recovery."""
    for fired in (event for event in events if event["kind"] == "fault_injected"):
        yield {"fault": fired["fault_kind"], "generation": fired["generation"], **_moments(events, fired)}


def recoveries(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """The same where a state is loaded, with what was lost and where the state came from."""
    size = next((event["state_bytes"] for event in events if event["kind"] == "note"), 0)
    losses = {incident.injected[0]: incident for incident in incidents(events) if incident.injected}
    for fired in (event for event in events if event["kind"] == "fault_injected"):
        load = _first_after(events, "load", fired)
        incident = losses.get(fired["id"])
        yield {
            "fault": fired["fault_kind"],
            "phase": fired["phase"],
            "step": fired["step"],
            "state_bytes": size,
            **_moments(events, fired),
            "restored_s": _since(fired, load),
            "load_s": load["seconds"] if load is not None else None,
            "tier": load["tier"] if load is not None else None,
            "steps_lost": incident.steps_lost if incident is not None else None,
        }


def end_of_job(events: Sequence[Event]) -> str | None:
    """The hash of the state that the job ended with."""
    return next((str(event["final_hash"]) for event in events if event["kind"] == "final"), None)


def _moments(events: Sequence[Event], fired: Event) -> dict[str, float | None]:
    """declared: the coordinator knows; out: the training function was left; cut, state, groups, gate: so far has the
    old generation gone from its process; plan: the next one is made; entered: its training function is called."""
    gone = _first_after(events, "left", fired)
    parts = dict(gone["parts"]) if gone is not None and gone["generation"] == fired["generation"] else {}
    of_process = {f"{name}_s": (ns - fired["t_ns"]) / 1e9 for name, ns in parts.items()}
    return {
        "declared_s": _since(fired, _first_after(events, "fault", fired)),
        "out_s": _since(fired, _first_after(events, "all_out", fired)),
        **of_process,
        "plan_s": _since(fired, _first_after(events, "plan", fired)),
        "entered_s": _since(fired, _first_after(events, "enter", fired)),
        "first_step_s": _since(fired, _first_after(events, "step", fired)),
    }


def _first_after(events: Sequence[Event], kind: str, fired: Event) -> Event | None:
    later = (event for event in events if event["kind"] == kind and event["t_ns"] > fired["t_ns"])
    return min(later, key=lambda event: int(event["t_ns"]), default=None)


def _since(fired: Event, event: Event | None) -> float | None:
    return (event["t_ns"] - fired["t_ns"]) / 1e9 if event is not None else None
