"""The data of the report's figures, small enough for a page whatever the run's size. Pure; drawn by figures.js.

Times are seconds from the run's start. Arrays of many small integers go as base64 of bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridethrough.ledger.incidents import Incident, place
from ridethrough.ledger.partition import Partition, rollback_bases
from ridethrough.ledger.schema import STAGES, STATES
from ridethrough.ledger.steps import Floats, Ints
from ridethrough.ledger.summary import RunLedger

_MOST_BARS = 6000
_POINTS = 3000
_CELLS = 1_000_000
_MOST_INCIDENTS = 2000


def figures(ledger: RunLedger) -> dict[str, Any]:
    """Everything that figures.js draws."""
    part, found = ledger.part, ledger.incidents
    return {
        "wall_s": part.wall_ns / 1e9,
        "states": [state for state in STATES if part.states_ns[state]],
        "codes": list(STATES),
        "timeline": timeline(part),
        "marks": marks(part, found),
        "steps": step_curves(ledger),
        "recovery": recovery(found),
        "saves": save_times(ledger),
    }


def timeline(part: Partition, *, bars: bool = True) -> dict[str, Any]:
    """Few ranks: a bar for each piece of each lane. Many: a matrix of states by rank and equal pieces of the wall
    (always, unless `bars`)."""
    if bars and sum(len(picture.ends) for picture in part.pictures) <= _MOST_BARS:
        by_state: dict[str, dict[str, list[Any]]] = {}
        for slot, picture in enumerate(part.pictures):
            for state, t0, t1 in picture.pieces(part.start_ns):
                bar = by_state.setdefault(state, {"y": [], "base": [], "x": []})
                bar["y"].append(slot)
                bar["base"].append(_s(t0 - part.start_ns))
                bar["x"].append(_s(t1 - t0))
        return {"kind": "bars", "slots": part.slots, "bars": by_state}
    columns = max(200, min(1500, _CELLS // part.slots))
    edges = part.start_ns + (np.arange(columns) + 0.5) * (part.wall_ns / columns)
    matrix = np.empty((part.slots, columns), np.uint8)
    for slot, picture in enumerate(part.pictures):
        matrix[slot] = picture.state[np.minimum(np.searchsorted(picture.ends, edges), len(picture.ends) - 1)]
    return {
        "kind": "matrix",
        "slots": part.slots,
        "columns": columns,
        "cells": base64.b64encode(matrix.tobytes()).decode(),
    }


def marks(part: Partition, found: Sequence[Incident]) -> list[dict[str, Any]]:
    return [
        {
            "t": _s(i.fault_ns - part.start_ns),
            "n": number,
            "rank": i.rank,
            "text": f"{number}: {i.class_} of rank {i.rank}, {place(i.phase, i.step)}"
            + (f" (injected: {' '.join(i.injected)})" if i.injected else ""),
        }
        for number, i in enumerate(found[:_MOST_INCIDENTS], 1)
    ]


def step_curves(ledger: RunLedger) -> dict[str, Any]:
    """Step time and loss of the lowest rank: `kept` steps and `lost` ones, each thinned to its peaks; null divides
    generations."""
    bases = rollback_bases(ledger.past)
    rank = min(ledger.steps, default=None)
    if rank is None:
        return {"rank": None, "kept": _curve([]), "lost": _curve([])}
    kept, lost = [], []
    for generation in ledger.past.generations:
        steps = generation.steps.get(rank)
        if steps is None:
            continue
        base = bases.get((generation.job, generation.number))
        took, loss = (steps.t1_ns - steps.t0_ns) / 1e9, steps.metric("loss")
        rows = (steps.step, took, loss if loss is not None else np.full(len(steps), np.nan))
        counts = steps.step <= base if base is not None else np.ones(len(steps), bool)
        kept.append(tuple(row[counts] for row in rows))
        lost.append(tuple(row[~counts] for row in rows))
    return {"rank": rank, "kept": _curve(kept), "lost": _curve(lost)}


def _curve(runs: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {"step": [], "time": [], "loss": []}
    every = max(1, sum(len(run[0]) for run in runs) // _POINTS)
    for step, took, loss in runs:
        if not len(step):
            continue
        if out["step"]:
            for column in out.values():
                column.append(None)
        places = thinned(took, every)
        out["step"] += step[places].tolist()
        out["time"] += [round(v, 6) for v in took[places].tolist()]
        out["loss"] += [round(v, 6) if math.isfinite(v) else None for v in loss[places].tolist()]
    return out


def thinned(values: Floats, every: int) -> Ints:
    """Places of every n-th value and of the highest in between, so that no peak is lost."""
    if every <= 1:
        return np.arange(len(values))
    whole = len(values) // every * every
    peaks = np.arange(0, whole, every) + values[:whole].reshape(-1, every).argmax(axis=1) if whole else np.arange(0)
    return np.unique(np.concatenate([np.arange(0, len(values), every), peaks, [len(values) - 1]]))


def recovery(found: Sequence[Incident]) -> dict[str, Any]:
    """Stages of each incident (the slowest, if they are many), and the times of each class."""
    shown = list(enumerate(found, 1))
    if len(shown) > _MOST_INCIDENTS:
        slowest = sorted(shown, key=lambda item: -sum(item[1].stages_s.values()))[:_MOST_INCIDENTS]
        shown = sorted(slowest, key=lambda item: item[0])
    classes: dict[str, list[float]] = {}
    for i in found:
        if i.first_step_s is not None:
            classes.setdefault(i.class_, []).append(round(i.first_step_s, 4))
    return {
        "n": [number for number, _ in shown],
        "text": [f"{number}: {i.class_}, rank {i.rank}, {i.rung or 'open'}" for number, i in shown],
        "stages": {stage: [round(i.stages_s.get(stage, 0.0), 6) for _, i in shown] for stage in STAGES},
        "classes": classes,
    }


def save_times(ledger: RunLedger) -> dict[str, Any]:
    """Of each committed save when it was done, how long it took to write and how old it then was; stalls of saves;
    and the age of the newest state on disk over time (it falls at each commit)."""
    start = ledger.part.start_ns
    staged: dict[int, int] = {}
    done: dict[int, tuple[int, float | None]] = {}
    stalls: list[tuple[float, float]] = []
    begins: dict[tuple[int, int], int] = {}
    for event in ledger.events:
        if event["kind"] == "save" and not isinstance(event.get("step"), int):
            continue
        if event["kind"] == "save" and event.get("event") == "staged":
            staged.setdefault(event["step"], event["t_ns"])
        elif event["kind"] == "save" and event.get("event") == "committed":
            done.setdefault(event["step"], (event["t_ns"], event.get("seconds")))
        elif event["kind"] == "phase" and event.get("phase") == "save" and event.get("rank") == 0:
            if event["edge"] == "begin":
                begins[event["generation"], 0] = event["t_ns"]
            elif (begun := begins.pop((event["generation"], 0), None)) is not None:
                stalls.append((_s(begun - start), _s(event["t_ns"] - begun)))
    order = sorted(done.items(), key=lambda item: item[1][0])
    every = max(1, len(order) // _POINTS)
    age: list[tuple[float, float]] = [(0.0, 0.0)]
    newest = start
    for step, (t_ns, _) in order[::every]:
        age.append((_s(t_ns - start), _s(t_ns - newest)))
        newest = staged.get(step, t_ns)
        age.append((_s(t_ns - start), _s(t_ns - newest)))
    age.append((_s(ledger.part.end_ns - start), _s(max(0, ledger.part.end_ns - newest))))
    writes = [(_s(t_ns - start), seconds, step) for step, (t_ns, seconds) in order[::every] if seconds is not None]
    return {"write": writes, "stall": stalls[:: max(1, len(stalls) // _POINTS)], "age": age if order else []}


def _s(ns: int) -> float:
    return round(ns / 1e9, 6)
