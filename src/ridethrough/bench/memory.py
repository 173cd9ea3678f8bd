"""`ridethrough bench memory`: what a snapshot of every step costs, and how fast it is back after a kill.

cost        blocks of steps with and without snapshots, in turn, in one job on one node
replicated  the same on two nodes of this machine, each node's snapshots streamed to the other, no faster than needed
killed      SIGKILL to a rank: the fault to the state restored on all ranks, beside what it takes at least in the same
            run: a copy of the state and a new group's first collective
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridethrough.bench.machine import measured_on, now
from ridethrough.bench.place import Place, clean_environment, ended_by_signals, free_port
from ridethrough.bench.spread import median
from ridethrough.ledger.reading import Event, read_events

BYTES = 12  # of state for each element: parameter and two moments
PARTS = ("cost", "replicated", "killed")
FAULT_STEP = 10
_RATE = 1.25  # a replication may use so much more than would do


@dataclass(frozen=True)
class MemoryBench:
    """What is asked for. `state_mb`: of a rank, in MB, for the costs. `killed_params`: parameters of the job that is
    killed, all of its `killed_ranks` together; 12 bytes of state each."""

    parts: Sequence[str] = PARTS
    state_mb: float = 240.0
    step_s: float = 0.5
    steps: int = 20
    reps: int = 5
    killed_params: float = 100e6
    killed_ranks: int = 4
    killed_reps: int = 3
    limit_s: float = 300.0
    keep: Path | None = None


def run_memory(bench: MemoryBench, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs the parts; returns the JSON of `bench memory`. Main thread; nothing is left running or on disk."""
    begun = now()
    results: list[dict[str, Any]] = []
    with ended_by_signals():
        for part in bench.parts:
            for rep in range(bench.killed_reps if part == "killed" else 1):
                row: dict[str, Any] = {"part": part, "rep": rep, "load_1min": os.getloadavg()[0], "error": None}
                try:
                    found = _killed(bench) if part == "killed" else _cost(bench, part)
                except (RuntimeError, OSError) as error:
                    found = {"error": str(error)}
                results.append({**row, **found})
                tell(f"{part}: {json.dumps(found)}")
    asked = {key: value for key, value in asdict(bench).items() if key != "keep"}
    environment = {**measured_on(Path()), "bench": asked}
    return {"kind": "memory", "begun": begun, "ended": now(), "environment": environment, "results": results}


def _cost(bench: MemoryBench, part: str) -> dict[str, Any]:
    numel = int(bench.state_mb * 1e6 / BYTES)
    options = {"part": "cost", "numel": numel, "step_s": bench.step_s, "steps": bench.steps, "reps": bench.reps}
    rate_mbps = _RATE * bench.state_mb / bench.step_s
    with _place(bench, part) as place:
        commands = _two_nodes(place, rate_mbps) if part == "replicated" else [_one_node(place, 1)]
        events = _to_its_end(place, commands, options, bench.limit_s)
    return {**costs(events), "rate_mbps": rate_mbps if part == "replicated" else None}


def costs(events: Sequence[Event]) -> dict[str, Any]:
    """Medians over the blocks, of the slowest rank in each; `added` of those with snapshots to those without."""
    blocks: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if event["kind"] == "note" and event.get("of") in ("control", "snapshots"):
            blocks.setdefault((event["of"], event["block"]), []).append(event)

    def middle(of: str, name: str) -> float:
        return median([max(event[name] for event in block) for (kind, _), block in blocks.items() if kind == of])

    control_s, step_s = middle("control", "step_s"), middle("snapshots", "step_s")
    replicas = [event["replica_s"] for event in events if event["kind"] == "memory" and event.get("replica_s")]
    return {
        "state_bytes": max(event["state_bytes"] for event in events if "state_bytes" in event),
        "control_s": control_s,
        "step_s": step_s,
        "added": step_s / control_s - 1,
        "added_of_median": middle("snapshots", "median_s") / middle("control", "median_s") - 1,
        "stall_s": middle("snapshots", "stall_s"),
        "cpu_s": middle("snapshots", "cpu_s") - middle("control", "cpu_s"),
        "replica_s": median(replicas) if replicas else None,
    }


def _killed(bench: MemoryBench) -> dict[str, Any]:
    options = {"part": "killed", "numel": int(bench.killed_params) // bench.killed_ranks, "step_s": bench.step_s}
    with _place(bench, "killed") as place:
        command = [*_one_node(place, bench.killed_ranks), "--fault-at", f"sigkill:1:{FAULT_STEP}:forward"]
        events = _to_its_end(place, [command], {**options, "steps": FAULT_STEP + 4}, bench.limit_s)
    return recovery(events)


def recovery(events: Sequence[Event]) -> dict[str, Any]:
    """Seconds from the fault until all ranks have left, the training function is called on all, all have loaded."""
    fired = next((event for event in events if event["kind"] == "fault_injected"), None)
    if fired is None:
        raise RuntimeError("the fault did not strike")

    def last(kind: str) -> Event:
        found = [event for event in events if event["kind"] == kind and event["t_ns"] > fired["t_ns"]]
        if not found:
            raise RuntimeError(f"no {kind} after the fault")
        return max(found, key=lambda event: int(event["t_ns"]))

    floors = [event for event in events if "memcpy_s" in event]
    least_s = max(event["memcpy_s"] for event in floors) + max(event["rebuild_s"] for event in floors)
    restored_s = (last("load")["t_ns"] - fired["t_ns"]) / 1e9
    return {
        "state_bytes": sum(
            event["state_bytes"] for event in events if event.get("generation") == 1 and "state_bytes" in event
        ),
        "out_s": (last("all_out")["t_ns"] - fired["t_ns"]) / 1e9,
        "entered_s": (last("enter")["t_ns"] - fired["t_ns"]) / 1e9,
        "restored_s": restored_s,
        "load_s": max(
            event["seconds"] for event in events if event["kind"] == "load" and event["t_ns"] > fired["t_ns"]
        ),
        "memcpy_s": max(event["memcpy_s"] for event in floors),
        "rebuild_s": max(event["rebuild_s"] for event in floors),
        "ratio": restored_s / least_s,
        "tier": last("load")["tier"],
    }


def _one_node(place: Place, ranks: int) -> list[str]:
    return _run(place, "--nproc-per-node", str(ranks))


def _two_nodes(place: Place, rate_mbps: float) -> list[list[str]]:
    """Both on the loopback; the first hosts the coordinator."""
    token = place.folder / "token"
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--token-file", str(token), "--replicas", "1"]
    shared += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--replica-rate", f"{rate_mbps:.0f}"]
    return [_run(place, *shared) for _ in range(2)]


def _run(place: Place, *options: str) -> list[str]:
    command = [sys.executable, "-m", "ridethrough", "run", "--runs", str(place.folder / "runs"), "--run-id", "bench"]
    return [*command, *options]


def _to_its_end(place: Place, commands: list[list[str]], options: dict[str, Any], limit_s: float) -> list[Event]:
    """The ledger of the job. Raises RuntimeError with its last words if it does not end well in time."""
    script = [
        str(Path(__file__).with_name("memory_job.py")),
        json.dumps({**options, "root": str(place.folder / "ckpt")}),
    ]
    processes = [
        place.start([*command, *script], f"node{index}", clean_environment()) for index, command in enumerate(commands)
    ]
    end_s = time.monotonic() + limit_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))
    codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        raise RuntimeError(f"exit codes {codes} within {limit_s:g} s: {place.last_words()}")
    return read_events(place.folder / "runs" / "bench")


def _place(bench: MemoryBench, name: str) -> Place:
    return Place(bench.keep / name if bench.keep is not None else None)
