"""Runs of `epochs_job.py`, and what they noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridethrough.ledger.partition import read_events

HERE = Path(__file__).parent


def options(job: Any, name: str, **more: Any) -> str:
    return json.dumps({"out": str(job.folder / name), "root": str(job.folder / f"ckpt-{name}"), **more})


def run(job: Any, name: str, *flags: str, ranks: int = 2, env: dict[str, str] | None = None, **more: Any) -> Any:
    """Start `epochs_job.py` as run `name`."""
    args = ["run", "--nproc-per-node", str(ranks), "--runs", "runs", "--run-id", name, *flags]
    return job.start(*args, str(HERE / "epochs_job.py"), options(job, name, **more), name=name, env=env)


def notes(job: Any, name: str, rank: int) -> dict[int, dict[str, Any]]:
    """Step -> what counts of it: the last note."""
    path = job.folder / name / f"rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {note["step"]: note for note in map(json.loads, lines)}


def loads(job: Any, name: str) -> list[tuple[int, str]]:
    """(step, tier) of each load of rank 0, in order."""
    events = read_events(job.folder / "runs" / name)
    return [(e["step"], e["tier"]) for e in events if e["kind"] == "load" and e["rank"] == 0]


SAME = ("ids", "loss", "draws", "weights", "scale")
