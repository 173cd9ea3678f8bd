"""What saves cost the user's own script: the same steps without saves, with blocking, and with asynchronous ones.

The script runs as it is; how its Checkpointer saves is told by RIDETHROUGH_CHECKPOINTER. Each way gets the same time.
From the first save on, which also sets things up, whole intervals of steps are compared with as many steps without.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridethrough.bench.mechanisms import Ridethrough, WorkloadSize
from ridethrough.bench.place import Place
from ridethrough.checkpoint.overrides import VARIABLE
from ridethrough.ledger.reading import Event, LedgerError, read_events

CONTROL = "off"
SAVES = {
    CONTROL: "every=0,memory=off",
    "sync": "mode=sync,memory=off",
    "async": "mode=async,memory=off",
    "memory": "mode=async,memory=1",
}


def ways(modes: Sequence[str]) -> list[str]:
    """The control, then what is asked for; nothing if nothing is."""
    return [CONTROL, *(mode for mode in modes if mode != CONTROL)] if modes else []


def run_saving(mode: str, every: int, script: list[str], num_ranks: int, python: str, limit_s: float) -> dict[str, Any]:
    """The script for `limit_s` with saves of this kind, as a row. Main thread."""
    saves = SAVES[mode] if mode == CONTROL else f"{SAVES[mode]},every={every}"
    with Place() as place:
        place.cwd = Path.cwd()
        events, words = _run(place, script, num_ranks, python, limit_s, saves)
    row = steps_of(events, every)
    error = None if row["step_s"] is not None else f"fewer than {2 * every} steps within {limit_s:.0f} s: {words}"
    if mode != CONTROL and error is None and not any(event["kind"] == "save" for event in events):
        error = "the script has no ridethrough.Checkpointer that run.steps tells of its steps"
    return {"mode": mode, "every": every, **row, "error": error}


def added(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `added_s_per_save`: wall beside the control's."""
    control_s = next((row["step_s"] for row in rows if row["mode"] == CONTROL), None)
    out = []
    for row in rows:
        known = row["error"] is None and control_s is not None and row["mode"] != CONTROL
        out.append({**row, "added_s_per_save": (row["step_s"] - control_s) * row["every"] if known else None})
    return out


def steps_of(events: Sequence[Event], every: int) -> dict[str, Any]:
    """Mean seconds of rank 0's steps over whole intervals, from the first save on, saves included. None: too few."""
    ends = {event["step"]: event["t1_ns"] for event in events if event["kind"] == "step" and event["rank"] == 0}
    first = next((step for step in sorted(ends) if step % every == 0), None)
    intervals = (max(ends) - first) // every if first is not None else 0
    writes = [e for e in events if e["kind"] == "save" and e.get("event") == "committed" and e.get("seconds")]
    write_s = max((float(event["seconds"]) for event in writes), default=None)
    if first is None or intervals < 1:
        return {"intervals": 0, "step_s": None, "write_s": write_s}
    last = first + intervals * every
    return {
        "intervals": intervals,
        "step_s": (ends[last] - ends[first]) / 1e9 / (last - first),
        "write_s": write_s,
    }


def saves_advice(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the ways of saving cost, in sentences with their figures."""
    control_s = next((row["step_s"] for row in rows if row["mode"] == CONTROL), None)
    return [
        f"saves {row['mode']}: one every {row['every']} steps of {control_s:.2f} s adds "
        f"{row['added_s_per_save']:.2f} s, {max(0.0, 1 - control_s / row['step_s']):.1%} of the time."
        for row in rows
        if control_s is not None and row["added_s_per_save"] is not None
    ]


def _run(
    place: Place, script: list[str], num_ranks: int, python: str, limit_s: float, saves: str
) -> tuple[list[Event], str]:
    class Saving(Ridethrough):
        script = property(lambda self: commanded)

        def env(self, **more: str) -> dict[str, str]:
            return super().env(**{VARIABLE: saves, **more})

    commanded = script
    mechanism = Saving(place, WorkloadSize(world_size=num_ranks), python, "ridethrough", None)
    mechanism.start()
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and not mechanism.poll():
        time.sleep(0.05)
    words = place.last_words()
    place.stop()
    try:
        return read_events(place.folder / "runs" / "bench"), words
    except (LedgerError, OSError):
        return [], words
