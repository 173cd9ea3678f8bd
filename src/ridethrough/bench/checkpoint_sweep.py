"""The checkpoint sweep: every mode over windows, world sizes and state sizes; one job per mode and size."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridethrough.bench.machine import measured_on, now
from ridethrough.bench.mechanisms import python_of
from ridethrough.bench.peer_versions import peer_versions
from ridethrough.bench.place import Place, clean_environment, ended_by_signals, free_port
from ridethrough.health.cgroup import available_memory_bytes

_FILES = ("checkpoint_job.py", "checkpoint_modes.py", "checkpoint_throttle.py")
MODES: dict[str, tuple[str | None, str]] = {
    "none": (None, "no saves: the control of every row"),
    "ridethrough": (None, "Checkpointer: the copy hidden behind the next forward and backward, a keeper writes"),
    "ridethrough-sync": (None, "Checkpointer(mode='sync'): the same files, training waits for them"),
    "ridethrough-memory": (None, "Checkpointer with its memory tier at every step"),
    "torch-save": (None, "torch.save of each rank's tensors"),
    "dcp-save": (None, "torch.distributed.checkpoint.save"),
    "dcp-async": (None, "torch.distributed.checkpoint.async_save in a thread"),
    "dcp-async-process": (None, "torch.distributed.checkpoint.async_save in a process"),
    "nvrx-async": ("nvrx", "NVRx TorchAsyncCheckpoint of a clone"),
}


@dataclass(frozen=True)
class Sweep:
    """What is asked for. `state_bytes` are those of one rank; a window is a multiple of the time of `dcp.save`."""

    modes: Sequence[str]
    windows: Sequence[float] = (10.0, 3.0, 1.0, 0.5)
    world_sizes: Sequence[int] = (2,)
    state_bytes: Sequence[int] = (512 << 20,)
    compute: str = "wait"
    interval: int = 10
    saves: int = 4
    reps: int = 1
    storage_mbps: float = 0.0
    peers: Mapping[str, Path] | None = None
    folder: Path | None = None
    limit_s: float = 600.0
    keep: Path | None = None


def run_sweep(sweep: Sweep, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything; returns the JSON of `bench checkpoint`. Main thread; cleans up as `run_matrix` does."""
    missing: list[dict[str, Any]] = []
    pythons: dict[str, str] = {}
    for mode in sweep.modes:
        try:
            pythons[mode] = python_of(MODES[mode][0], sweep.peers or {})
        except FileNotFoundError as error:
            tell(f"{mode}: left out: {error}")
            missing.append({"mode": mode, "error": str(error)})
    begun = now()
    results: list[dict[str, Any]] = []
    calibrations: list[dict[str, Any]] = []
    with ended_by_signals():
        for world_size, state_bytes in ((w, s) for w in sweep.world_sizes for s in sweep.state_bytes):
            size = {"world_size": world_size, "state_bytes": state_bytes}
            (found,), trouble, _ = _job(sweep, "dcp-save", python_of(None, {}), size, None)
            if trouble is not None:
                raise RuntimeError(f"the calibration by dcp.save failed: {trouble}")
            calibrations.append({**size, **found})
            tell(f"{world_size} ranks x {state_bytes >> 20} MiB: dcp.save takes {found['write_s']:.2f} s")
            for rep in range(sweep.reps):
                for mode in _turned(list(pythons), rep):
                    for row in _rows(sweep, mode, pythons[mode], size, found["write_s"]):
                        results.append({"mode": mode, "rep": rep, "compute": sweep.compute, **size, **row})
                        tell(_line(results[-1]))
    asked = {key: value for key, value in asdict(sweep).items() if key not in ("peers", "folder", "keep")}
    return {
        "kind": "checkpoint",
        "begun": begun,
        "ended": now(),
        "environment": {
            **measured_on(sweep.folder or Path()),
            "peers": peer_versions({mode: pythons[mode] for mode in pythons if MODES[mode][0]}),
            "sweep": asked,
        },
        "calibrations": calibrations,
        "missing": missing,
        "results": results,
    }


def _turned(modes: list[str], rep: int) -> list[str]:
    turn = rep % len(modes) if modes else 0
    return modes[turn:] + modes[:turn]


def _rows(sweep: Sweep, mode: str, python: str, size: dict[str, int], write_s: float) -> Iterator[dict[str, Any]]:
    if mode == "none":
        for window in sweep.windows:
            yield {**dict.fromkeys(_FIELDS), "window": window, "interval_steps": sweep.interval, "efficiency": 1.0}
        return
    load = os.getloadavg()[0]
    rows, error, host_bytes = _job(sweep, mode, python, size, write_s)
    for row in rows:
        yield {**row, "host_bytes": host_bytes, "load_1min": load, "error": None}
    if error is not None:
        for window in sweep.windows[len(rows) :]:
            blank = dict.fromkeys(_FIELDS)
            yield {**blank, "window": window, "interval_steps": sweep.interval, "load_1min": load, "error": error}


_FIELDS = (
    *("efficiency", "added_s_per_save", "load_s", "blocked_s_per_save", "write_s", "freshness_s", "superseded"),
    *("host_bytes", "cpu_s_per_gb", "wrong_tensors", "drain_s", "error"),
)


def _job(
    sweep: Sweep, mode: str, python: str, size: dict[str, int], write_s: float | None
) -> tuple[list[dict[str, Any]], str | None, int]:
    """Rows that came, why it ended badly (or None), and the peak of the job's memory (PSS of all its processes)."""
    free = available_memory_bytes()
    need = size["world_size"] * (5 * size["state_bytes"] + 300_000_000)
    if free is not None and need > free:
        return [], f"needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free", 0
    with Place(sweep.keep / f"{mode}-{size['world_size']}" if sweep.keep is not None else None) as place:
        for file in _FILES:
            shutil.copyfile(Path(__file__).with_name(file), place.folder / file)
        out = place.folder
        settings = {"mode": mode, "out": str(out), "windows": list(sweep.windows), "saves": sweep.saves}
        settings |= {"interval": sweep.interval, "write_s": write_s, "compute": sweep.compute, **size}
        (place.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        port = free_port()
        env = clean_environment()
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size["world_size"])}
        if sweep.storage_mbps:
            env["BENCH_STORAGE_RATE"] = str(sweep.storage_mbps * 1e6)
            env |= {"RIDETHROUGH_FILE_HOOK": "checkpoint_throttle:hook", "PYTHONPATH": str(place.folder)}
        command = [python, str(place.folder / "checkpoint_job.py"), str(place.folder / "settings.json")]
        for rank in range(size["world_size"]):
            ranked = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            place.start(command, f"rank{rank}", ranked)
        with _memory_watched(place) as peak:
            over = _wait(place, sweep.limit_s)
        codes = [process.poll() for process in place.processes.values()]
        place.stop()
        log = (place.folder / "rank0.log").read_text(errors="replace")
        rows = [json.loads(line.split("RESULT ", 1)[1]) for line in log.splitlines() if "RESULT " in line]
        bad = f"exit codes {codes}: {place.last_words()}" if any(codes) else None
        error = bad if over else f"not over after {sweep.limit_s:g} s: {place.last_words()}"
        return rows or ([{}] if write_s is None else []), error, peak[0]


def _wait(place: Place, limit_s: float) -> bool:
    """Until all ranks have ended, or one badly. False at the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        codes = [process.poll() for process in place.processes.values()]
        if all(code is not None for code in codes) or any(codes):
            return True
        time.sleep(0.05)
    return False


class _memory_watched:
    """Samples the memory of a place's processes once a second; gives a list with the peak so far."""

    def __init__(self, place: Place) -> None:
        self._place, self._peak = place, [0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self._peak

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self._peak[0] = max(self._peak[0], sum(_pss_bytes(pid) for pid in self._place.alive()))


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def why_not(row: Mapping[str, Any]) -> str | None:
    """Why a row's efficiency does not count: None if it does."""
    if row["error"] is not None:
        return str(row["error"])
    if row["added_s_per_save"] is None:
        return None
    if row["wrong_tensors"] != 0:
        return "no, its last save is wrong" if row["wrong_tensors"] else "no, its last save does not load"
    if row["freshness_s"] > row["freshness_bound_s"]:
        return f"no, its newest durable state was {row['freshness_s']:.1f} s old"
    return None


def _line(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return f"{row['mode']} x{row['window']:g}: {row['error']}"
    if row["added_s_per_save"] is None:
        return f"{row['mode']} x{row['window']:g}: control"
    names = ("efficiency", "added_s_per_save", "blocked_s_per_save", "write_s", "freshness_s", "load_s")
    shown = ", ".join(f"{name} {row[name]:.3f}" for name in names if row[name] is not None)
    return f"{row['mode']} x{row['window']:g}: {shown}, superseded {row['superseded']}, wrong {row['wrong_tensors']}"
