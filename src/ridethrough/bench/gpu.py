"""`ridethrough bench gpu`: what restarts, saves and the memory tier cost on one GPU.

One job after another, each with a limit.

copies    what the machine can do at most: copies and disk, without our code
restarts  many restarts in place by exceptions: memory, threads, and the time of each stage
gate      sticky CUDA errors, a leaked model, a live graph: each must end in a new process
killed    a rank killed under a snapshot of every step: what is lost, how fast it is back, the same end bit for bit
memory    a snapshot of every step, beside the same steps without
saves     a save every 40 and every 10 steps, beside the same steps without
long      the same with steps that outlast the copy
peers     a save every 40 steps by torch.save, dcp.async_save, NVRx
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridethrough.bench.gpu_reading import end_of_job, failures, notes, recoveries
from ridethrough.bench.machine import measured_on, now
from ridethrough.bench.peer_versions import peer_versions
from ridethrough.bench.place import OF_A_JOB, Place, ended_by_signals, free_port
from ridethrough.ledger.reading import Event, read_events

STICKY = ("device_assert", "illegal_access", "out_of_memory", "leak", "cuda_graph", "busy_gpu")
PEERS = ("torch-save", "dcp-async", "nvrx-async")
_ENDLESS = 1_000_000
_NO_BUDGET = dict.fromkeys(("max_restarts", "max_rank_faults", "max_cheap_in_window", "max_costly_in_window"), _ENDLESS)


@dataclass(frozen=True)
class GpuBench:
    """What is asked for. `dim` and `layers` are of the model that is saved (12 bytes a parameter); the memory tier's
    has a third of the layers, and the one that restarts has sizes of its own. `step_s`: of a step between saves;
    `long_step_s`: of one that outlasts the copy."""

    parts: Sequence[str]
    dim: int = 2048
    layers: int = 24
    restart_dim: int = 1536
    restart_layers: int = 12
    length: int = 512
    step_s: float = 0.2
    long_step_s: float = 0.45
    memory_step_s: float = 0.3
    killed_sequences: int = 48
    cycles: int = 50
    reps: int = 3
    sticky: Sequence[str] = STICKY
    peers: Sequence[str] = PEERS
    every: Sequence[int] = (40, 10)
    steps: int = 80
    copies_gib: float = 8.0
    limit_s: float = 300.0
    folder: Path | None = None
    keep: Path | None = None


def run_gpu(bench: GpuBench, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs the parts; returns the JSON of `bench gpu`, with what was measured so far if it is interrupted. Main thread;
    nothing is left running or on disk."""
    begun = now()
    results: list[dict[str, Any]] = []
    cut_off = False
    try:
        with ended_by_signals():
            for part in bench.parts:
                common = {"part": part, "load_1min": os.getloadavg()[0], "error": None}
                for row in _rows(bench, part):
                    results.append({**common, **row})
                    tell(f"{part}: {json.dumps(row)}")
    except KeyboardInterrupt:
        cut_off = True
    asked = {key: value for key, value in asdict(bench).items() if key not in ("folder", "keep")}
    return {
        "kind": "gpu",
        "begun": begun,
        "ended": now(),
        "environment": {
            **measured_on(bench.folder or Path()),
            "peers": peer_versions({"all modes": sys.executable}) if "peers" in bench.parts else {},
            "bench": asked,
        },
        "cut_off": cut_off,
        "results": results,
    }


def _rows(bench: GpuBench, part: str) -> Iterator[dict[str, Any]]:
    try:
        yield from PARTS[part](bench)
    except (RuntimeError, OSError) as error:
        yield {"error": str(error)}


def _copies(bench: GpuBench) -> Iterator[dict[str, Any]]:
    with _place(bench, "copies") as place:
        command = [sys.executable, "-m", "ridethrough.bench.gpu_copies_job", str(place.folder), str(bench.copies_gib)]
        yield from _results(place, command, bench.limit_s)


def _restarts(bench: GpuBench) -> Iterator[dict[str, Any]]:
    events, _ = _failing(bench, "restarts", ["exception"] * bench.cycles)
    yield from ({**note, **failure} for note, failure in zip(notes(events), failures(events), strict=False))


def _gate(bench: GpuBench) -> Iterator[dict[str, Any]]:
    events, why = _failing(bench, "gate", [*bench.sticky, "exception"])
    pids = [note["pid"] for note in notes(events)]
    for number, failure in enumerate(failures(events)):
        replaced = len(pids) > number + 1 and pids[number + 1] != pids[number]
        yield {**failure, "replaced": replaced, "why": why.get(failure["generation"], "")}


def _killed(bench: GpuBench) -> Iterator[dict[str, Any]]:
    faults = ["sigkill:0:15:backward", "exception:0:22:backward", "sigkill:0:30:forward", "sigkill:0:40:step"]
    ends = []
    for name, struck in (("control", []), ("killed", faults)):
        with _place(bench, name) as place:
            options = {"root": str(place.folder / "ckpt"), "total": 48, "sequences": bench.killed_sequences}
            options |= {"dim": bench.dim, "layers": max(1, bench.layers // 3)}
            flags = [word for fault in struck for word in ("--fault-at", fault)]
            events, _ = _launched(bench, place, "gpu_killed_job.py", options, flags)
            ends.append(end_of_job(events))
            yield from recoveries(events)
    yield {"final_equal": ends[0] == ends[1], "final_hashes": ends}


def _memory(bench: GpuBench) -> Iterator[dict[str, Any]]:
    steps = max(2, bench.steps // 7)  # short blocks, so that a GPU that grows warm and slow does not count
    size = {"layers": max(1, bench.layers // 3), "step_s": bench.memory_step_s, "control_steps": steps}
    yield from _saving(bench, "ridethrough-memory", [{"every": 0, "steps": steps}], 3 * bench.reps, **size)


def _saves(bench: GpuBench) -> Iterator[dict[str, Any]]:
    blocks = [{"every": every, "steps": bench.steps} for every in bench.every]
    yield from _saving(bench, "ridethrough", blocks, bench.reps)


def _long(bench: GpuBench) -> Iterator[dict[str, Any]]:
    every = bench.every[0] // 2
    yield from _saving(bench, "ridethrough", [{"every": every, "steps": 3 * every}], 1, step_s=bench.long_step_s)


def _peers(bench: GpuBench) -> Iterator[dict[str, Any]]:
    for mode in bench.peers:
        try:
            yield from _saving(bench, mode, [{"every": bench.every[0], "steps": bench.steps}], 1)
        except RuntimeError as error:
            yield {"mode": mode, "error": str(error)}


PARTS: dict[str, Callable[[GpuBench], Iterator[dict[str, Any]]]] = {
    "copies": _copies,
    "restarts": _restarts,
    "gate": _gate,
    "killed": _killed,
    "memory": _memory,
    "saves": _saves,
    "long": _long,
    "peers": _peers,
}


def _saving(
    bench: GpuBench, mode: str, blocks: list[dict[str, int]], reps: int, **size: Any
) -> Iterator[dict[str, Any]]:
    settings = {"dim": bench.dim, "layers": bench.layers, "length": bench.length, "step_s": bench.step_s, **size}
    settings = {"control_steps": bench.steps // 4, **settings, "mode": mode, "blocks": blocks, "reps": reps}
    with _place(bench, f"{mode}-{settings['step_s']:g}") as place:
        path = place.folder / "settings.json"
        path.write_text(json.dumps({**settings, "out": str(place.folder)}), encoding="utf-8")
        for row in _results(place, [sys.executable, str(_job("gpu_saving_job.py")), str(path)], bench.limit_s):
            yield {"mode": mode, **row}


def _failing(bench: GpuBench, name: str, kinds: list[str]) -> tuple[list[Event], dict[int, str]]:
    """A job that fails in these ways, a generation each: its events, and why processes were replaced by generation."""
    with _place(bench, name) as place:
        options = {"kinds": kinds, "dim": bench.restart_dim, "layers": bench.restart_layers}
        return _launched(bench, place, "gpu_restarts_job.py", options, [])


def _launched(
    bench: GpuBench, place: Place, script: str, options: dict[str, Any], flags: list[str]
) -> tuple[list[Event], dict[int, str]]:
    (place.folder / "policy.json").write_text(json.dumps(_NO_BUDGET), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ridethrough",
        "run",
        "--nproc-per-node",
        "1",
        "--runs",
        str(place.folder / "runs"),
    ]
    command += ["--run-id", "job", "--policy", str(place.folder / "policy.json"), *flags]
    # What makes cuBLAS repeatable has to be set before CUDA is up.
    extra = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    _to_its_end(place, [*command, str(_job(script)), json.dumps(options)], bench.limit_s, extra)
    run = place.folder / "runs" / "job"
    why = {}
    for log in sorted(run.glob("logs/g*-rank0.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "this process is replaced: " in line:
                why[int(log.name[1:5])] = line.split("this process is replaced: ", 1)[1]
    return read_events(run), why


def _results(place: Place, command: list[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows that a job prints, as they come. Raises RuntimeError as `_to_its_end` does."""
    process, num_read = _begin(place, command, {}), 0
    end_s = time.monotonic() + limit_s
    over = False
    while not over:
        over = process.poll() is not None or time.monotonic() > end_s
        lines = (place.folder / "job.log").read_text(errors="replace").split("\n")[:-1]
        yield from (json.loads(line.split("RESULT ", 1)[1]) for line in lines[num_read:] if "RESULT {" in line)
        num_read = len(lines)
        time.sleep(0.0 if over else 0.2)
    _judge(place, process.poll(), limit_s)


def _to_its_end(place: Place, command: list[str], limit_s: float, extra: dict[str, str]) -> None:
    """Raises RuntimeError with the job's last words if it does not end well in time."""
    process = _begin(place, command, extra)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    _judge(place, process.poll(), limit_s)


def _begin(place: Place, command: list[str], extra: dict[str, str]) -> subprocess.Popen[bytes]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1", **extra}
    env |= {"LOCAL_RANK": "0", "PYTHONUNBUFFERED": "1"}
    return place.start(command, "job", env)


def _judge(place: Place, code: int | None, limit_s: float) -> None:
    if code is None:
        raise RuntimeError(f"not over after {limit_s:g} s: {place.last_words()}")
    if code != 0:
        raise RuntimeError(f"exit code {code}: {place.last_words()}")


def _place(bench: GpuBench, name: str) -> Place:
    return Place(bench.keep / name if bench.keep is not None else None)


def _job(script: str) -> Path:
    return Path(__file__).with_name(script)
