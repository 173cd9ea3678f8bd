"""Event histories for tests: builders of single events, and the worked case of docs/ledger.md."""

from __future__ import annotations

import json
from pathlib import Path

S = 1_000_000_000


def event(kind: str, t_s: float, **fields: object) -> dict:
    return {"kind": kind, "t_ns": round(t_s * S), **fields}


def job_start(t_s: float, slots: int) -> dict:
    return event("job_start", t_s, slots=slots, nodes=1, run_id="a")


def plan(t_s: float, generation: int, ranks: list[int]) -> dict:
    members = [{"rank": r, "local_rank": r, "node": 0, "worker": f"w{r}", "pid": 100 + r} for r in ranks]
    return event("plan", t_s, generation=generation, epoch=0, world_size=len(ranks), members=members, resume=None)


def step(t0_s: float, t1_s: float, number: int, *, generation: int = 0, rank: int = 0, parts: tuple = ()) -> dict:
    return {
        **event("step", t1_s, generation=generation, rank=rank, step=number, t0_ns=round(t0_s * S)),
        "t1_ns": round(t1_s * S),
        "parts": [[state, round(a * S), round(b * S)] for state, a, b in parts],
    }


def fault(t_s: float, *, generation: int = 0, rank: int = 0, **fields: object) -> dict:
    known = {"class": "exception", "phase": "forward", "step": 8, "cause": "boom", "detected_by": "exception"}
    return event("fault", t_s, generation=generation, rank=rank, **{**known, **fields})


def worked_case(rank: int = 0) -> list[dict]:
    """10 steps of 1 s, a save at step 4 that stalls nothing, a crash at 7.5 s, 5 s to the resumed loop."""
    gr = {"rank": rank}
    return [
        event("enter", 0, generation=0, **gr),
        event("loop", 0, generation=0, step=0, **gr),
        *(step(n - 1, n, n, **gr) for n in range(1, 8)),
        event("fault_injected", 7.5, generation=0, id=0, fault_kind="exception", phase="forward", step=8, **gr),
        event("leave", 8.7, generation=0, cause="boom", **gr),
        event("enter", 10, generation=1, **gr),
        event("phase", 11, generation=1, phase="load", edge="begin", step=0, **gr),
        event("phase", 12, generation=1, phase="load", edge="end", step=4, **gr),
        event("resumed", 12, generation=1, step=4, tier="disk", source="step-4", **gr),
        event("loop", 12.5, generation=1, step=4, **gr),
        *(step(12.5 + n - 5, 12.5 + n - 4, n, generation=1, **gr) for n in range(5, 11)),
        event("finish", 18.5, generation=1, step=10, **gr),
    ]


def around(slots: int = 1) -> list[dict]:
    ranks = list(range(slots))
    return [
        job_start(0, slots),
        plan(0, 0, ranks),
        fault(8, fault_ns=7_400_000_000),
        event("all_out", 9, generation=0),
        plan(9.5, 1, ranks),
        event("job_end", 18.5, code=0, reason="done"),
    ]


def write(folder: Path, name: str, events: list[dict], *, boot: str = "b", wall_ns: int = 0, tail: str = "") -> None:
    (folder / "events").mkdir(exist_ok=True)
    header = {
        "t_ns": 0,
        "kind": "header",
        "schema": 1,
        "role": name.split("-")[1],
        "host": name.split("-")[0],
        "pid": 1,
        "boot_id": boot,
        "mono_ns": 0,
        "wall_ns": wall_ns,
        "version": "0",
    }
    text = "\n".join(json.dumps(e) for e in [header, *events]) + "\n" + tail
    (folder / "events" / f"{name}.jsonl").write_text(text)
