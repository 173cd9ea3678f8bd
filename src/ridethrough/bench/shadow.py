"""The matrix for a user's own script: one that calls `rt.run`, on the user's own file system, within a time budget.

First, if asked, what its saves cost (shadow_saves.py). Then the mechanisms.

Each mechanism gets the same share of the budget and is ended as soon as the step that the fault struck is done again,
so that a script of days is measured in minutes. Under the peers the script runs as it would without us, once per
process; its ledger is written all the same, and the launchers' half of it is made as in recovery_reading.py. `{out}` in
the script's arguments becomes a fresh folder for each run.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.bench.machine import measured_on
from ridethrough.bench.mechanisms import MECHANISMS, Mechanism, Ridethrough, WorkloadSize, python_of
from ridethrough.bench.place import Place, ended_by_signals
from ridethrough.bench.recovery_reading import measures
from ridethrough.bench.shadow_saves import added, run_saving, saves_advice, ways
from ridethrough.faults.injector import OBSERVER
from ridethrough.faults.schedule import Schedule, by_hand
from ridethrough.faults.shot import SCHEDULE_VARIABLE
from ridethrough.ledger.reading import Event, LedgerError, read_events
from ridethrough.report.advice import young_s

SHADOWED = ("ridethrough", "ridethrough-process", "torchrun", "nvrx-launcher", "restart-job", "kubernetes-pods")


@dataclass(frozen=True)
class Shadow:
    """What is asked for. `command` is the script and its arguments; `folder` is where `{out}` folders are made;
    `peers`: environments by name, which have what the script imports, ridethrough too."""

    command: Sequence[str]
    mechanisms: Sequence[str]
    faults: Sequence[str]
    num_ranks: int
    budget_s: float
    fault_step: int
    folder: Path
    python: str
    mtbf_h: float = 24.0
    saves: Sequence[str] = ()
    save_every: int = 5
    peers: Mapping[str, Path] = field(default_factory=dict)


@dataclass
class _Watch:
    """The script's processes of one run, found by their event files; each is watched through a pidfd."""

    events_dir: Path
    ended_ns: dict[int, int] = field(default_factory=dict)
    _pidfds: dict[int, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Notes new processes, and those that ended since the last look."""
        for path in self.events_dir.glob("*-worker-*.jsonl"):
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            pid = int(path.stem.split("-worker-")[1].split(".")[0])
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[os.pidfd_open(pid)] = pid
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            self.ended_ns[self._pidfds.pop(pidfd)] = time.monotonic_ns()
            os.close(pidfd)

    def close(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()


def run_shadow(shadow: Shadow, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything; returns the JSON of `bench shadow`. Main thread; cleans up as `run_matrix` does."""
    pairs = [(name, fault) for fault in shadow.faults for name in shadow.mechanisms]
    modes = ways(shadow.saves)
    share_s = shadow.budget_s / (len(pairs) + len(modes))
    size = WorkloadSize(world_size=shadow.num_ranks)
    results, saves = [], []
    with ended_by_signals():
        for mode in modes:
            with _out_folder(shadow.folder) as out:
                script = _script(shadow, out)
                saving = run_saving(mode, shadow.save_every, script, shadow.num_ranks, shadow.python, share_s)
            saves.append(saving)
            shown = f"{saving['step_s']:.3f} s a step" if saving["error"] is None else saving["error"]
            tell(f"saves {mode}: {shown}")
        for name, fault in pairs:
            schedule = by_hand([f"{fault}:{-1}:{shadow.fault_step}"], shadow.fault_step, shadow.num_ranks)
            try:
                row = _run(shadow, name, schedule, size, share_s)
            except FileNotFoundError as error:  # a peer without an environment
                row = {**_EMPTY, "error": str(error)}
            results.append({"mechanism": name, "fault": fault, "rep": 0, **row})
            first = row["first_step_s"]
            shown = f"first step after {first:.2f} s" if first is not None else row["error"]
            tell(f"{name} {fault}: {shown}")
    found = {"kind": "shadow", "environment": measured_on(shadow.folder), "command": list(shadow.command)}
    saves = added(saves)
    return {**found, "saves": saves, "results": results, "advice": [*saves_advice(saves), *advice(results, shadow)]}


def _run(shadow: Shadow, name: str, schedule: Schedule, size: WorkloadSize, limit_s: float) -> dict[str, Any]:
    with _out_folder(shadow.folder) as out, Place() as place:
        place.cwd = Path.cwd()
        faults = place.folder / "faults.json"
        schedule.save(faults)
        chosen = MECHANISMS[name]
        python = python_of(chosen.env, shadow.peers) if chosen.env == "nvrx" else shadow.python
        mechanism = _shadowed(chosen.make, _script(shadow, out), faults)(place, size, python, name, None)
        ours = issubclass(chosen.make, Ridethrough)
        run_dir = place.folder / ("runs/bench" if ours else "run")
        (place.folder / "run" / "events").mkdir(parents=True)
        watch = _Watch(run_dir / "events")
        start_ns, looked_s = time.monotonic_ns(), 0.0
        mechanism.start()
        over = caught_up = False
        while not over and not caught_up and time.monotonic_ns() - start_ns < limit_s * 1e9:
            over = mechanism.poll()
            watch.look()
            if time.monotonic() > looked_s + 0.5:
                looked_s = time.monotonic()
                caught_up = _caught_up(run_dir, size.world_size)
            time.sleep(0.01)
        end_ns = time.monotonic_ns()
        error = mechanism.failed() if over and not caught_up else None
        words = place.last_words()
        place.stop()
        watch.look()
        watch.close()
        events = _events(run_dir)
        if not any(event["kind"] == "enter" for event in events):
            return {**_EMPTY, "error": f"no sign of rt.run within {limit_s:.0f} s: {words}"}
        events = _with_processes(events) if ours else _by_process(events)
        row = measures(events, watch.ended_ns, size.world_size, start_ns, end_ns)
        saves = [event for event in events if event["kind"] == "save" and event.get("event") == "committed"]
        row["write_s"] = max((float(event.get("seconds") or 0) for event in saves), default=None)
        if row["first_step_s"] is None:
            error = error or f"no step after the fault within {limit_s:.0f} s: {words}"
        return {**row, "container_restarts": mechanism.container_restarts, "final_equal": None, "error": error}


_EMPTY: dict[str, Any] = dict.fromkeys(
    ("detected_s", "all_out_s", "first_step_s", "caught_up_s", "load_s", "steps_lost", "attempts", "failed_attempts")
    + ("processes_replaced", "container_restarts", "final_equal", "step_s", "write_s")
)


def _script(shadow: Shadow, out: Path) -> list[str]:
    return [word.replace("{out}", str(out)) for word in shadow.command]


def _shadowed(kind: type[Mechanism], script: list[str], faults: Path) -> type[Mechanism]:
    """The mechanism with the user's script in place of the workload."""
    ours = issubclass(kind, Ridethrough)
    command = ["--fault-schedule", str(faults), *script] if ours else script

    def env(self: Mechanism, **more: str) -> dict[str, str]:
        found = kind.env(self, **more)
        if not ours:
            found |= {SCHEDULE_VARIABLE: str(faults), "RIDETHROUGH_OBSERVERS": OBSERVER}
            found["RIDETHROUGH_RUN_DIR"] = str(self.place.folder / "run")
        return found

    return type(f"Shadowed{kind.__name__}", (kind,), {"script": property(lambda self: command), "env": env})


@contextlib.contextmanager
def _out_folder(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ridethrough-shadow-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _events(run_dir: Path) -> list[Event]:
    try:
        return read_events(run_dir)
    except (LedgerError, OSError):
        return []


def _caught_up(run_dir: Path, world_size: int) -> bool:
    """Every rank has done the struck step, or a later one, after the fault."""
    events = _events(run_dir)
    fault = next((event for event in events if event["kind"] == "fault_injected"), None)
    if fault is None:
        return False
    done = {
        e["rank"] for e in events if e["kind"] == "step" and e["t_ns"] > fault["t_ns"] and e["step"] >= fault["step"]
    }
    return len(done) == world_size


def _by_process(events: list[Event]) -> list[Event]:
    """A rank's n-th process is its n-th generation: where nobody else numbers them."""
    order: dict[int, list[str]] = {}
    for event in events:
        if (
            event.get("role") == "worker"
            and "rank" in event
            and event["file"] not in order.setdefault(event["rank"], [])
        ):
            order[event["rank"]].append(event["file"])
    number = {file: place for files in order.values() for place, file in enumerate(files, 1)}
    numbered = [{**e, "generation": number[e["file"]]} if e["file"] in number else e for e in events]
    return _with_processes([e for e in numbered if e["kind"] == "header" or e["file"] in number])


def _with_processes(events: list[Event]) -> list[Event]:
    """The workers' own events, with a word of each process at its header, as the workload writes it."""
    ranks = {event["file"]: event["rank"] for event in events if "rank" in event and event.get("role") == "worker"}
    out: list[Event] = []
    for event in events:
        rank = ranks.get(event["file"])
        if rank is None:
            continue
        out.append(event)
        if event["kind"] == "header":
            out.append({**event, "kind": "process", "rank": rank, "generation": 0})
    return out


def advice(results: Sequence[dict[str, Any]], shadow: Shadow) -> list[str]:
    """What to turn on, in sentences with their figures."""
    out: list[str] = []
    for fault in shadow.faults:
        times = {
            row["mechanism"]: row["caught_up_s"] for row in results if row["fault"] == fault and row["caught_up_s"]
        }
        if not times:
            out.append(f"{fault}: nothing came back within its share of the budget: give a larger --budget.")
            continue
        best = min(times, key=lambda name: times[name])
        for name, seconds in times.items():
            if name != best:
                saved_h = (seconds - times[best]) * shadow.num_ranks * 7 * 24 / shadow.mtbf_h / 3600
                out.append(
                    f"{fault}: {best} is back where it was after {times[best]:.1f} s, {name} after {seconds:.1f} s: "
                    f"with a failure every {shadow.mtbf_h:g} h that is {saved_h:.2f} rank-hours a week."
                )
    ours = [row for row in results if row["mechanism"] == "ridethrough" and row.get("step_s")]
    if ours and ours[0].get("write_s"):
        step_s, write_s = ours[0]["step_s"], ours[0]["write_s"]
        every = max(1, round(young_s(write_s, shadow.mtbf_h * 3600) / step_s))
        hidden = max(1, round(write_s / step_s + 0.5))
        out.append(
            f"A step takes {step_s:.2f} s, a durable save {write_s:.2f} s: if saves block, every {every} steps is best "
            f"(Young); asynchronous ones may come every {hidden} steps without any being superseded."
        )
    return out
