"""A large run's folder as a long job leaves it, and how long the index and the report of it take:

    python tests/report/large_run.py /tmp/large --ranks 64 --steps 100000 --incidents 500
    python tests/report/large_run.py /tmp/large --measure

Every process's steps are in blocks, as `ridethrough.ledger.compact` makes them of closed segments; all else is text.
Half of the incidents are exceptions (survivors and guilty stay), half SIGKILLs (a new process, so a new file).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ridethrough.ledger.blocks import BlockSteps, write_block
from ridethrough.ledger.rundir import create_run

MS = 1_000_000
STEP_NS = 50 * MS
SAVE_EVERY = 100
LOST = 5
HEADER = {"t_ns": 0, "kind": "header", "schema": 1, "boot_id": "b", "mono_ns": 0, "wall_ns": 0, "version": "0"}


@dataclass
class Process:
    """What one worker process wrote."""

    lines: list[tuple[int, dict]] = field(default_factory=list)  # t_ns, event
    steps: list[np.ndarray] = field(default_factory=list)  # rows: t1, generation, step, t0


class Writer:
    def __init__(self, root: Path, ranks: int, steps: int, incidents: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranks, self.steps, self.num_incidents = ranks, steps, incidents
        config = {"steps": steps, "nproc_per_node": ranks, "timeout_s": 900}
        self.run = create_run(root, run_id="large", config=config, command=["train"], schedule_hash="f" * 16)
        self.launcher: list[dict] = [{**HEADER, "role": "agent", "host": "h", "pid": 1}]
        self.processes = [Process() for _ in range(ranks)]
        self.pid = [1000 + rank for rank in range(ranks)]
        self.next_pid = 1000 + ranks

    def write(self) -> Path:
        t = 1_000 * MS
        self.say("job_start", t, slots=self.ranks, nodes=1, run_id="large")
        t, base = t + 3_000 * MS, 0
        cuts = np.sort(self.rng.choice(np.arange(20, self.steps - 20), self.num_incidents, replace=False)).tolist()
        for number, cut in enumerate([*cuts, self.steps], 1):
            t = self.generation(number, t, base, max(cut, base + 2), last=number > len(cuts))
            base = max(0, max(cut, base + 2) - LOST)
        for rank in range(self.ranks):
            self.close(rank)
        self.say("job_end", t, code=0, reason="done")
        (self.run.path / "events" / "h-agent-1.jsonl").write_text("".join(json.dumps(e) + "\n" for e in self.launcher))
        self.run.finish(0, "done")
        return self.run.path

    def say(self, kind: str, t: int, **fields: object) -> None:
        self.launcher.append({"t_ns": t, "kind": kind, **fields})

    def generation(self, number: int, t: int, base: int, reach: int, last: bool) -> int:
        members = [{"rank": r, "local_rank": r, "node": "n", "worker": f"w{self.pid[r]}"} for r in range(self.ranks)]
        self.say("plan", t, generation=number, epoch=0, world_size=self.ranks, members=members, resume=None)
        loop = t + 400 * MS
        count = reach - base
        ends = loop + np.cumsum(STEP_NS + self.rng.integers(0, 4 * MS, count))
        guilty = int(self.rng.integers(self.ranks))
        kill = bool(number % 2)
        fault = int(ends[-1]) + 25 * MS
        for rank, process in enumerate(self.processes):
            where = {"generation": number, "rank": rank}
            self.tell(process, "enter", t + 50 * MS, **where)
            self.tell(process, "load", t + 200 * MS, **where, step=base, tier="memory", source=None, seconds=0.05)
            self.tell(process, "loop", loop, **where, step=base)
            t1 = ends + self.rng.integers(0, MS, count)
            t0 = np.concatenate([[loop], t1[:-1]])
            process.steps.append(np.stack([t1, np.full(count, number), np.arange(base + 1, reach + 1), t0]))
            for step in range(base + SAVE_EVERY - base % SAVE_EVERY, reach + 1, SAVE_EVERY):
                at = int(t1[step - base - 1])
                self.tell(process, "save", at + 3 * MS, **where, step=step, event="staged", bytes=10**9, seconds=0.001)
                if rank == 0:
                    done = at + 2_000 * MS
                    self.tell(process, "save", done, **where, step=step, event="committed", bytes=10**9, seconds=2.0)
            if last:
                self.tell(process, "finish", int(ends[-1]) + 2 * MS, **where, step=reach, stopped=False)
                self.tell(process, "exit", int(ends[-1]) + 900 * MS, **where, code=0)
            elif rank == guilty:
                kind = "sigkill" if kill else "exception"
                injected = {"id": f"f{number}", "fault_kind": kind, "phase": "forward", "step": reach + 1}
                self.tell(process, "fault_injected", fault, **where, **injected)
            if not last and not (kill and rank == guilty):
                self.tell(process, "leave", fault + 60 * MS, **where, cause="connection closed by peer")
        if last:
            return int(ends[-1]) + 1_000 * MS
        self.incident(number, guilty, kill, fault, reach)
        if kill:
            self.close(guilty)
            self.processes[guilty] = Process()
            self.pid[guilty], self.next_pid = self.next_pid, self.next_pid + 1
        return fault + 150 * MS

    def incident(self, number: int, guilty: int, kill: bool, fault: int, reach: int) -> None:
        name, seen = ("sigkill", "waitpid") if kill else ("exception", "exception")
        about = {"generation": number, "rank": guilty, "host": "n", "phase": "forward", "step": reach + 1}
        about |= {"class": name, "detected_by": seen}
        cause = f"Traceback (most recent call last):\n  step {reach + 1}\nRuntimeError: NCCL timeout of 900 s"
        self.say("fault", fault + 20 * MS, **about, cause=cause, fault_ns=None, worker="w", pid=1)
        victims = [r for r in range(self.ranks) if r != guilty][:3]
        closed = {"class": "collective", "cause": "connection closed by peer"}
        self.say("all_out", fault + 100 * MS, generation=number)
        times = {"declared_ns": fault + 20 * MS, "fault_ns": None, "all_out_ns": fault + 100 * MS}
        fields = {"id": f"0.{number}", "rung": "replace_process" if kill else "in_process", "attempts": 1}
        secondary = [{"rank": r, **closed} for r in victims]
        self.say("incident", fault + 101 * MS, **about, **fields, **times, root_cause=cause, secondary=secondary)

    @staticmethod
    def tell(process: Process, kind: str, t: int, **fields: object) -> None:
        process.lines.append((t, {"t_ns": t, "kind": kind, **fields}))

    def close(self, rank: int) -> None:
        """Write what a process said as one block."""
        process, pid = self.processes[rank], self.pid[rank]
        t1, generation, step, t0 = np.concatenate(process.steps, axis=1).astype(np.int64)
        count = len(t1)
        header = {**HEADER, "role": "worker", "host": "h", "pid": pid}
        lines = [(0, header), *sorted(process.lines, key=lambda line: line[0])]
        times = np.array([t for t, _ in lines])
        order = np.argsort(np.concatenate([times, t1]), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        wait = t0 + self.rng.integers(50_000, 150_000, count)
        steps = BlockSteps(
            line=place[len(lines) :],
            t_ns=t1,
            generation=generation,
            rank=np.full(count, rank),
            step=step,
            t0_ns=t0,
            t1_ns=t1,
            part_count=np.ones(count, np.int64),
            part_state=np.zeros(count, np.int64),
            part_a=wait,
            part_b=wait + self.rng.integers(100_000, MS, count),
            states=["data_wait"],
            metrics={
                "loss": (
                    (6 - np.log1p(step / 500) + self.rng.random(count) / 5).astype(np.float32).astype(float),
                    None,
                ),
                "tokens": (np.full(count, 8192), None),
            },
        )
        rest = [json.dumps(event).encode() for _, event in lines]
        data = write_block(steps, place[: len(lines)].astype(np.int64), rest, len(order))
        (self.run.path / "events" / f"h-worker-{pid}.block").write_bytes(data)


MEASURED = {
    "index": "from ridethrough.report.index import Index; print(Index(Path(root)).refresh(rebuild=True))",
    "report": "from ridethrough.report.html import write_report; print(write_report(Path(root) / 'large').stat())",
}


def measure(root: Path) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds and peak memory of index and report, each in a fresh process."""
    found = {}
    for name, code in MEASURED.items():
        begun = time.monotonic()
        command = [sys.executable, "-c", f"from pathlib import Path; root = {str(root)!r}; {code}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name} failed")
        cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6
        found[name] = {"wall_s": time.monotonic() - begun, "cpu_s": cpu, "peak_gb": peak}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--incidents", type=int, default=500)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.root), indent=1))
    else:
        path = Writer(options.root, options.ranks, options.steps, options.incidents).write()
        size = sum(file.stat().st_size for file in (path / "events").iterdir())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{path}: {size / 1e6:.0f} MB of events, written with {peak:.1f} GB")
