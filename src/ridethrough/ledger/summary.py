"""What a run came to, as the JSON of `demo --json` and `runs show --json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.ledger.history import History, history
from ridethrough.ledger.incidents import Incident, by_class, history_incidents
from ridethrough.ledger.partition import Partition, partition_history
from ridethrough.ledger.reading import Event, LedgerError, read_split
from ridethrough.ledger.rundir import RunDir
from ridethrough.ledger.schema import problems
from ridethrough.ledger.steps import StepTable


@dataclass(frozen=True)
class RunLedger:
    """A run read once: description, events, history, partition and incidents; reports are drawn from it.

    `events` are all but the steps, in the order of time; `steps` are by rank."""

    run: dict[str, Any]
    path: Path
    events: list[Event]
    steps: dict[int, StepTable]
    past: History
    part: Partition
    incidents: list[Incident]


def read_run(run_dir: Path | str, end_ns: int | None = None) -> RunLedger:
    """Read a run's folder. `end_ns`: for a job that still runs, until when (monotonic ns of its host).

    Raises RunDirError (no run folder) or LedgerError (no events, damage, a sum that is not the wall).
    """
    run = RunDir.open(run_dir)
    try:
        split = read_split(run.path)
    except OSError as error:
        raise LedgerError(f"{error.filename or run.path} cannot be read ({error.strerror})") from error
    try:
        past = history(split, end_ns)
        part = partition_history(past)
        found = history_incidents(past)
    except LedgerError as error:
        raise LedgerError(f"{run.path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:  # lines that are events, and not what the schema says
        raise LedgerError(_misfit(run.path, split.rest, error)) from error
    return RunLedger(_described(run, split.rest), run.path, split.rest, split.steps, past, part, found)


def _described(run: RunDir, events: list[Event]) -> dict[str, Any]:
    """What run.json says; its config with the policy of the last job, where that is not the default."""
    about = run.run_json()
    started = [event for event in events if event["kind"] == "job_start"]
    policy = started[-1].get("policy") if started else None
    return {**about, "config": {**about["config"], "policy": policy}} if policy else about


def _misfit(path: Path, events: list[Event], error: Exception) -> str:
    for event in events:
        if wrong := problems(event):
            return (
                f"{path / 'events' / str(event['file'])}: {wrong[0]} (line of t_ns {event['t_ns']}): damaged, or "
                "written by another version; `ridethrough schema` says what it must be"
            )
    return f"{path / 'events'}: {type(error).__name__}: {error}"


def summary(run_dir: Path | str, *, control_hash: str | None = None, end_ns: int | None = None) -> dict[str, Any]:
    """The JSON of one run; `control_hash` is the final hash of the undisturbed run (None: `bitwise_equal` is null)."""
    return ledger_summary(read_run(run_dir, end_ns), control_hash=control_hash)


def ledger_summary(ledger: RunLedger, *, control_hash: str | None = None) -> dict[str, Any]:
    """The same from a run that was already read."""
    final = final_results(ledger.events)
    part = ledger.part
    last = _last_step(ledger.past)
    return {
        "run_id": ledger.run["run_id"],
        "config_hash": ledger.run["config_hash"],
        "schedule_hash": ledger.run["schedule_hash"],
        "bitwise_equal": None if control_hash is None else control_hash == final.get("final_hash"),
        "control_hash": control_hash,
        "final_hash": final.get("final_hash"),
        "steps": last[0],
        "final_loss": final.get("final_loss", last[1]),
        "val_loss": final.get("val_loss"),
        "training_goodput": part.training_goodput,
        "infrastructure_goodput": part.infrastructure_goodput,
        "ledger": {"wall_ns": part.wall_ns, "slots": part.slots, "states_ns": dict(part.states_ns)},
        "incidents": [incident.as_json() for incident in ledger.incidents],
        "classes": by_class(ledger.incidents),
        "generations": len(ledger.past.generations),
        "result": ledger.run["result"],
    }


def final_results(events: list[Event]) -> dict[str, Any]:
    """The fields of the last `final` event of the lowest rank that wrote one; empty if none did."""
    finals = [event for event in events if event["kind"] == "final"]
    if not finals:
        return {}
    newest = max((e.get("generation", 0) for e in finals[-1:]), default=0)
    latest = [e for e in finals if e.get("generation", 0) == newest]
    return min(reversed(latest), key=lambda e: int(e.get("rank", 0)))


def _last_step(past: History) -> tuple[int, float | None]:
    """The newest finished step (0: none), and its loss, of the lowest rank that has it."""
    for generation in reversed(past.generations):
        if generation.steps:
            reached = {rank: int(steps.step[-1]) for rank, steps in generation.steps.items()}
            rank = min(reached, key=lambda rank: (-reached[rank], rank))
            losses = generation.steps[rank].metric("loss")
            loss = None if losses is None or not math.isfinite(losses[-1]) else float(losses[-1])
            return reached[rank], loss
    return 0, None
