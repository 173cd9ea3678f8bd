"""The results of `ridethrough bench gpu` as tables: for the terminal and for the page of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ridethrough.bench.spread import median
from ridethrough.ledger.incidents import percentile

Row = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]

_MOMENTS = {
    "declared_s": "the fault is declared",
    "unwound_s": "the training function is left",
    "cut_s": "groups cut",
    "state_s": "callbacks done, snapshots handed over",
    "groups_s": "groups destroyed, garbage collected",
    "gate_s": "gate and health checks passed",
    "plan_s": "next plan",
    "entered_s": "group made, training function called",
    "restored_s": "state loaded",
    "first_step_s": "first step done",
}
_HELD = {
    "allocated_bytes": ("GPU memory allocated, MB", 1e-6),
    "reserved_bytes": ("GPU memory reserved, MB", 1e-6),
    "device_bytes": ("GPU memory of all processes (NVML), MB", 1e-6),
    "threads": ("threads", 1),
    "fds": ("descriptors", 1),
}


def tables(results: Sequence[Row]) -> Iterator[Table]:
    """(title, header, rows) of each part that ran, and one of those that failed."""
    for part in dict.fromkeys(row["part"] for row in results):
        rows = [row for row in results if row["part"] == part and not row["error"]]
        if rows:
            yield from _TABLES.get(part, _saves)(rows)
    failed = [[str(row["part"]), str(row.get("mode", "")), str(row["error"])] for row in results if row["error"]]
    if failed:
        yield "Not measured", ("part", "mode", "why"), failed


def _copies(rows: Sequence[Row]) -> Iterator[Table]:
    names = [name for name in rows[0] if name not in ("part", "load_1min", "error")]
    cells = [[name.replace("_", " "), f"{rows[0][name]:.1f}"] for name in names]
    yield "What the machine does at most, without our code", ("what", "GB/s"), cells


def _restarts(rows: Sequence[Row]) -> Iterator[Table]:
    same = sum(after["pid"] == before["pid"] for before, after in itertools.pairwise(rows))
    title = f"{len(rows)} restarts by exceptions, {same + 1} entries in the first process: seconds from the fault"
    moments = [name for name in _MOMENTS if rows[0].get(name) is not None]
    cells = []
    for name in moments:
        values = [row[name] for row in rows]
        cells.append([_MOMENTS[name], *(f"{v:.3f}" for v in (median(values), percentile(values, 95), max(values)))])
    yield title, ("until", "median", "p95", "max"), cells
    cells = []
    for name, (what, scale) in _HELD.items():
        values = [row[name] * scale for row in rows if name in row]
        if values:
            shown = (values[0], values[min(1, len(values) - 1)], values[len(values) // 2], values[-1], max(values))
            cells.append([what, *(f"{value:.0f}" for value in shown)])
    yield (
        "What is held at each entry, before the model is built",
        ("what", "1st", "2nd", "middle", "last", "most"),
        cells,
    )


def _gate(rows: Sequence[Row]) -> Iterator[Table]:
    moments = ("declared_s", "gate_s", "plan_s", "entered_s", "first_step_s")
    cells = [
        [row["fault"], "new process" if row["replaced"] else "the same", row["why"], *(_s(row.get(n)) for n in moments)]
        for row in rows
    ]
    header = ("fault", "goes on in", "why", *(f"{name[:-2].replace('_', ' ')} s" for name in moments))
    yield "The gate: who may enter again", header, cells


def _killed(rows: Sequence[Row]) -> Iterator[Table]:
    moments = ("declared_s", "plan_s", "entered_s", "restored_s", "first_step_s", "load_s")
    cells = [
        [row["fault"], f"{row['phase']} of {row['step']}", _count(row["steps_lost"]), str(row["tier"])]
        + [_s(row[name]) for name in moments]
        + [f"{row['state_bytes'] / row['load_s'] / 1e9:.1f}" if row["load_s"] else "-"]
        for row in rows
        if "fault" in row
    ]
    size = next((row["state_bytes"] for row in rows if "state_bytes" in row), 0)
    equal = next((row["final_equal"] for row in rows if "final_equal" in row), None)
    end = {True: "the same, bit for bit, as", False: "NOT the same as", None: "not compared with"}[equal]
    title = f"A snapshot of {size / 1e9:.1f} GB at every step; the end state is {end} that of a job without faults"
    header = ("fault", "in", "steps lost", "from", *(f"{name[:-2].replace('_', ' ')} s" for name in moments), "GB/s")
    yield title, header, cells


def _saves(rows: Sequence[Row]) -> Iterator[Table]:
    blocks = [row for row in rows if row["what"] == "block"]
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in blocks:
        groups.setdefault((row["mode"], row["every"]), []).append(row)
    cells = []
    for (mode, every), group in groups.items():
        written = [row for row in group if row["written"] and row["write_s"]]
        rates = [row["state_bytes"] / row["write_s"] / 1e9 for row in written]
        copied = [row["state_bytes"] / seconds / 1e9 for row in group for seconds in row.get("copy_s", ())]
        fresh = sum(row["freshness_s"] <= row["freshness_bound_s"] for row in group)
        cells.append(
            [mode, str(every), f"{len(group)} x {group[0]['num_saves']}", _middle(group, "control_step_s")]
            + [f"{median([row['control_spread'] for row in group]):.1%}"]
            + [_middle(group, "added_s_per_save"), _middle(group, "efficiency"), _longest(group)]
            + [f"{median(copied):.1f}" if copied else "-", _middle(group, "write_s")]
            + [f"{median(rates):.2f}" if rates else "-", _middle(group, "superseded")]
            + [_middle(group, "freshness_s"), f"{fresh}/{len(group)}"]
        )
    header: tuple[str, ...] = (
        "mode",
        "every",
        "saves",
        "step s",
        "controls differ",
        "added s per save",
        "efficiency",
        "longest step s",
        "copy GB/s",
    )
    header += ("write s", "write GB/s", "superseded", "oldest s", "fresh enough")
    yield f"Saves of {rows[0]['state_bytes'] / 1e9:.1f} GB", header, cells
    yield from _beginning_and_end(rows)


def _memory(rows: Sequence[Row]) -> Iterator[Table]:
    blocks = [row for row in rows if row["what"] == "block"]
    shares = [row["added_s_per_step"] / row["control_step_s"] for row in blocks]
    differ = median([row["control_spread"] for row in blocks])
    cells = [
        [f"{len(blocks)} x {blocks[0]['steps']}", f"{median([row['control_step_s'] for row in blocks]):.4f}"]
        + [f"{share:.2%}" for share in (median(shares), min(shares), max(shares), differ)]
        + [_longest(blocks), str(blocks[-1]["held"]), str(blocks[-1]["not_held"])]
    ]
    header = ("blocks x steps", "step s without", "added (median)", "least", "most", "two controls differ by")
    title = f"A snapshot of {rows[0]['state_bytes'] / 1e9:.1f} GB at every step, blocks with and without in turn"
    yield title, (*header, "longest step s", "held", "not held"), cells
    yield from _beginning_and_end(rows)


def _beginning_and_end(rows: Sequence[Row]) -> Iterator[Table]:
    cells = []
    for row in rows:
        if row["what"] == "warm_up":
            what = f"{row['mode']}: snapshot memory registered after {row['steps']} steps, which took longer by"
            cells.append([what, _s(row["added_s"])])
            compared = ", ".join(_s(seconds) for seconds in row["compared_steps_s"])
            cells += [["the two steps whose snapshots are compared whole", compared]] if compared else []
        if row["what"] == "load":
            rate, bad = row["state_bytes"] / row["load_s"] / 1e9, row["wrong_tensors"]
            what = f"{row['mode']}: the last save loaded ({rate:.1f} GB/s), {bad} tensors differ"
            cells.append([what, _s(row["load_s"])])
    if cells:
        yield "At the beginning and the end", ("what", "s"), cells


def _middle(rows: Iterable[Row], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return f"{median(values):.3f}" if values else "-"


def _longest(rows: Iterable[Row]) -> str:
    return _s(max(row["longest_step_s"] for row in rows))


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


_TABLES: dict[str, Callable[[Sequence[Row]], Iterator[Table]]] = {
    "copies": _copies,
    "restarts": _restarts,
    "gate": _gate,
    "killed": _killed,
    "memory": _memory,
}
"""Of a part that is not here, what its saves cost."""
