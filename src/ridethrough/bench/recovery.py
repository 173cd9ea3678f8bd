"""The recovery matrix: every mechanism meets the same faults, repeated and interleaved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridethrough.bench.machine import measured_on, now
from ridethrough.bench.mechanisms import MECHANISMS, WorkloadSize, python_of
from ridethrough.bench.peer_versions import peer_versions
from ridethrough.bench.place import Place, ended_by_signals
from ridethrough.bench.recovery_reading import final, measures
from ridethrough.faults.draw import Draw
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.schedule import Fault, Schedule, plan
from ridethrough.ledger.reading import read_events

NODE_LOSS = "node_loss"
FAULTS = (
    "exception",
    "hang",
    "hang_loop",
    "hang_lock",
    "hang_skip_collective",
    "sigstop",
    "sigkill",
    "sigsegv",
    "exit",
)
_FIELDS = ("detected_s", "collective_out_s", "all_out_s", "first_step_s", "caught_up_s", "load_s")


@dataclass(frozen=True)
class Matrix:
    """What is asked for. `schedule` holds one fault per kind and rep, id `<kind>-<rep>`."""

    mechanisms: Sequence[str]
    faults: Sequence[str]
    reps: int
    schedule: Schedule
    size: WorkloadSize
    peers: Mapping[str, Path]
    limit_s: float = 150.0
    keep: Path | None = None


def fault_schedule(
    kinds: Sequence[str], reps: int, seed: int, size: WorkloadSize, at: tuple[int, int] | None
) -> Schedule:
    """The faults of all mechanisms. `at`: (step, rank) of every fault, in the forward pass; None: drawn by seed, rep by
    rep. What a kind leaves to chance (which hang) is drawn for each rep either way."""
    draw = Draw(seed)
    faults = []
    for kind in kinds:
        for rep in range(reps):
            if at is None:
                drawn = plan(seed + rep, 1, (kind,), None, size.steps, size.world_size).faults[0]
                faults.append(Fault(f"{kind}-{rep}", drawn.step, drawn.rank, drawn.phase, kind, drawn.args))
            else:
                args = KINDS[kind].draw_args(draw, f"args/{kind}/{rep}")
                faults.append(Fault(f"{kind}-{rep}", at[0], at[1], "forward", kind, args))
    return Schedule(seed, tuple(faults))


def run_matrix(matrix: Matrix, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything and returns the JSON of `bench recovery`. `tell` gets a line per run. Main thread.

    On Ctrl-C, SIGTERM and errors everything that was started is ended and removed. When it is cut off among the runs,
    those before count (`cut_off` is true); before the first one and on errors it raises."""
    pythons: dict[str, str] = {}
    missing: list[dict[str, Any]] = []
    for name in matrix.mechanisms:
        try:
            pythons[name] = python_of(MECHANISMS[name].env, matrix.peers)
        except FileNotFoundError as error:
            tell(f"{name}: left out: {error}")
            missing.append({"mechanism": name, "error": str(error)})
    begun = now()
    results: list[dict[str, Any]] = []
    cut_off = False
    with ended_by_signals():
        names = _families(pythons)
        controls = {key: _control(matrix, name, tell, key[0]) for key, name in names.items()}
        for name, fault, rep in _interleaved(list(pythons), matrix):
            try:
                row = _measured(matrix, name, pythons[name], fault, rep, controls)
            except KeyboardInterrupt:
                cut_off = True
                tell(f"cut off; {len(results)} runs were measured")
                break
            results.append(row)
            tell(_line(row))
    return {
        "kind": "recovery",
        "begun": begun,
        "ended": now(),
        "environment": {
            **measured_on(),
            "peers": peer_versions({name: pythons[name] for name in pythons if MECHANISMS[name].env}),
            "clock_factor": matrix.size.clock_factor,
            "workload": asdict(matrix.size),
        },
        "schedule_hash": matrix.schedule.hash,
        "schedule": matrix.schedule.as_json(),
        "missing": missing,
        "controls": [{"by": names[key], "family": key[1], **value} for key, value in controls.items()],
        "results": results,
        "cut_off": cut_off,
    }


def _families(pythons: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """(interpreter, family) -> the mechanism that runs its control."""
    out: dict[tuple[str, str], str] = {}
    for name, python in pythons.items():
        family = MECHANISMS[name].family
        out[python, family] = "restart-job" if family == "ddp" else name
    return out


def _interleaved(names: list[str], matrix: Matrix) -> Iterator[tuple[str, str, int]]:
    for rep in range(matrix.reps):
        for place, fault in enumerate(matrix.faults):
            turn = (rep + place) % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                if name != "ridethrough-node":
                    yield name, fault, rep
                elif place == 0:
                    yield name, NODE_LOSS, rep


def _control(matrix: Matrix, name: str, tell: Callable[[str], None], python: str) -> dict[str, Any]:
    """A run without fault: what the others must end like."""
    row = _run(matrix, name, python, None, "control")
    tell(f"control by {name}: {row['wall_s']:.1f} s, step {row['step_s'] or 0:.2f} s, hash {row['final_hash']}")
    return {
        key: row[key]
        for key in ("final_hash", "final_loss", "wall_s", "step_s", "states_s", "training_goodput", "error")
    }


def _measured(
    matrix: Matrix, name: str, python: str, fault: str, rep: int, controls: Mapping[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    by_id = {entry.id: entry for entry in matrix.schedule.faults}
    planned = by_id[f"{matrix.faults[0] if fault == NODE_LOSS else fault}-{rep}"].as_json()
    row = _run(matrix, name, python, {**planned, "kind": fault}, f"{name}-{fault}-{rep}")
    expected = controls[python, MECHANISMS[name].family]["final_hash"]
    equal = row["final_hash"] == expected if expected is not None and row["final_hash"] is not None else None
    return {"mechanism": name, "fault": fault, "rep": rep, "final_equal": equal, **row}


def _run(matrix: Matrix, name: str, python: str, fault: dict[str, Any] | None, label: str) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with Place(matrix.keep / label if matrix.keep is not None else None) as place:
        mechanism = MECHANISMS[name].make(place, matrix.size, python, name, fault)
        mechanism.prepare()
        start_ns = time.monotonic_ns()
        mechanism.start()
        over = False
        while not over and time.monotonic_ns() - start_ns < matrix.limit_s * 1e9:
            over = mechanism.poll()
            time.sleep(0.01)
        error = mechanism.failed() if over else f"not over after {matrix.limit_s:g} s"
        end_ns = time.monotonic_ns()
        place.stop()
        events = read_events(place.folder)
        if fault is not None and not any(event["kind"] == "fault_injected" for event in events):
            error = error or "the planned fault never fired"
        row = measures(events, place.ended_ns, matrix.size.world_size, start_ns, end_ns)
        row["final_hash"], row["final_loss"] = final(events)
        if fault is not None and row["first_step_s"] is None:
            error = f"{error or 'no step after the fault'}: {place.last_words()}"
    own = {"container_restarts": mechanism.container_restarts, "network": mechanism.network}
    own |= {"load_1min": load, "error": error}
    if name == "kubernetes-pods":
        own["clock_factor"] = matrix.size.clock_factor
    return {**row, **own}


def _line(row: Mapping[str, Any]) -> str:
    times = " ".join(f"{field} {row[field]:.2f}" for field in _FIELDS if row[field] is not None)
    equal = {True: "equal", False: "DIFFERENT END", None: "no end"}[row["final_equal"]]
    trouble = f" ({row['error']})" if row["error"] else ""
    return f"{row['mechanism']} {row['fault']} {row['rep']}: {times} lost {row['steps_lost']} {equal}{trouble}"
