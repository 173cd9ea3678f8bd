"""The results of `ridethrough bench memory` as tables: for the terminal and for the page of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridethrough.bench.spread import median

Row = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]

_KILLED = {
    "out_s": "all ranks out of the training function",
    "entered_s": "training function called on all ranks",
    "restored_s": "state loaded on all ranks",
    "load_s": "of that: the slowest rank's load",
    "memcpy_s": "a copy of the state into fresh memory, all ranks at once",
    "rebuild_s": "a new group's first collective",
    "ratio": "loaded, over the last two together",
}


def memory_tables(results: Sequence[Row]) -> Iterator[Table]:
    """(title, header, rows) of what ran, and one of what failed."""
    costs = [row for row in results if row["part"] != "killed" and not row["error"]]
    if costs:
        header = ("snapshots", "state, MB a rank", "step without, s", "with, s", "added", "added to the median step")
        spent = ("training thread, ms", "CPU of all processes, ms", "replica, s")
        yield "What a snapshot of every step adds", (*header, *spent), [_cost(row) for row in costs]
    killed = [row for row in results if row["part"] == "killed" and not row["error"]]
    if killed:
        cells = []
        for name, text in _KILLED.items():
            values = [row[name] for row in killed]
            cells.append([text, *(f"{value:.2f}" for value in (median(values), min(values), max(values)))])
        title = f"SIGKILL to one rank, {killed[0]['state_bytes'] / 1e9:.2f} GB of state: seconds from the fault"
        yield f"{title}; {len(killed)} runs", ("until", "median", "least", "most"), cells
    failed = [[str(row["part"]), str(row["error"])] for row in results if row["error"]]
    if failed:
        yield "Not measured", ("part", "why"), failed


def _cost(row: Row) -> list[str]:
    where = "own node" if row["part"] == "cost" else f"and on another node, at most {row['rate_mbps']:.0f} MB/s"
    replica = f"{row['replica_s']:.2f}" if row["replica_s"] is not None else "-"
    times = [f"{row['state_bytes'] / 1e6:.0f}", f"{row['control_s']:.4f}", f"{row['step_s']:.4f}"]
    times += [f"{row['added']:.2%}", f"{row['added_of_median']:.2%}"]
    return [where, *times, f"{row['stall_s'] * 1e3:.1f}", f"{row['cpu_s'] * 1e3:.0f}", replica]
