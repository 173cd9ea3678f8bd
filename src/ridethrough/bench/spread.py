"""Medians, tails and ratios of repeated measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ridethrough.ledger.incidents import percentile

TIMES = ("detected_s", "collective_out_s", "all_out_s", "first_step_s", "caught_up_s", "load_s")


def median(values: Sequence[float]) -> float:
    """The mean of the two in the middle where their number is even. Needs one value."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """`n`, `median`, `p95`, `p99`, `max`: percentiles by nearest rank."""
    tails = {f"p{percent}": percentile(values, percent) for percent in (95, 99)}
    return {"n": len(values), "median": median(values), **tails, "max": max(values)}


def recovery_table(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per fault and mechanism in the order they come: runs, recovered, the spread of each time, medians of the
    counts, and `ratio`: the median of `first_step_s` over the fastest mechanism's for that fault (among those that
    recovered each time)."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["fault"], result["mechanism"]), []).append(result)
    rows = []
    for (fault, mechanism), runs in groups.items():
        recovered = [run for run in runs if run["first_step_s"] is not None]
        row: dict[str, Any] = {
            "fault": fault,
            "mechanism": mechanism,
            "runs": len(runs),
            "recovered": len(recovered),
            "final_equal": sum(run["final_equal"] is True for run in runs),
        }
        for name in TIMES:
            values = [run[name] for run in runs if run.get(name) is not None]
            row[name] = spread(values) if values else None
        for name in ("steps_lost", "attempts", "failed_attempts", "processes_replaced", "container_restarts"):
            values = [run[name] for run in runs if run[name] is not None]
            row[name] = median(values) if values else None
        for name in ("training_goodput", "infrastructure_goodput"):
            row[name] = median([run[name] for run in runs])
        rows.append(row)
    for row in rows:
        rivals = [r for r in rows if r["fault"] == row["fault"] and r["recovered"] == r["runs"]]
        best = min((r["first_step_s"]["median"] for r in rivals), default=None)
        own = row["first_step_s"]
        row["ratio"] = own["median"] / best if own is not None and best else None
    return sorted(rows, key=lambda row: (row["fault"], row["ratio"] if row["ratio"] is not None else float("inf")))
