"""docs/benchmarks.md from docs/benchmarks/*.json: nothing on the page but what the files say.

A file is named for what it measures, `<anything>.json`, and says its `kind`: recovery, checkpoint, memory, gpu,
simulation or simulation-check. One with `"preliminary": "why"` is marked so. `ridethrough bench page` writes the page;
a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.bench.checkpoint_sweep import why_not
from ridethrough.bench.gpu_tables import tables
from ridethrough.bench.mechanisms import MECHANISMS
from ridethrough.bench.memory_tables import memory_tables
from ridethrough.bench.page_plots import Bar, bars
from ridethrough.bench.spread import median, recovery_table

Content = Mapping[str, Any]

_HEAD = """# Benchmarks

Made by `ridethrough bench page` from the JSON in [benchmarks/](benchmarks); do not edit. Figures that were measured and
figures that were simulated are apart. Each section names its machine and the command that repeats it. All mechanisms of
a section ran in turn, in one run, on one machine, and met the same faults (the schedule's hash is shown). Where ours is
not first, the table says so: the ratio is to the fastest.
"""


@dataclass
class Page:
    """`text` is the page; `plots` its drawings, by file name, which it finds in the folder `plots` beside the JSON."""

    text: str = ""
    plots: dict[str, str] = field(default_factory=dict)

    def plot(self, name: str, title: str, rows: Sequence[Bar], unit: str, top: float | None = None) -> Iterator[str]:
        """Draws the bars into a file and yields the line that shows it; nothing without rows."""
        if rows:
            file = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") + ".svg"
            self.plots[file] = bars(title, rows, unit, top)
            yield f"![{title}](benchmarks/plots/{file})\n"


def page(folder: Path) -> Page:
    """The whole page from every JSON file of a folder, in the order of their names. Raises ValueError on a file of no
    known kind."""
    made, parts = Page(), [_HEAD]
    contents = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    for title, kinds in (
        ("Measured", ("gpu", "recovery", "memory", "checkpoint")),
        ("Simulated", ("simulation", "simulation-check")),
    ):
        chosen = [(name, content) for name, content in contents if content.get("kind") in kinds]
        parts += [f"## {title}\n"] if chosen else []
        for name, content in chosen:
            parts.append("\n".join(_SECTIONS[content["kind"]](name, content, made)))
    unknown = [name for name, content in contents if content.get("kind") not in _SECTIONS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: of no kind that the page knows ({', '.join(_SECTIONS)})")
    made.text = "\n".join(parts).rstrip() + "\n"
    return made


def _about(name: str, content: Content) -> Iterator[str]:
    machine, versions = content["environment"]["machine"], content["environment"]["versions"]
    if content.get("preliminary"):
        yield f"**Preliminary:** {content['preliminary']}\n"
    loads = [row["load_1min"] for row in content["results"] if row.get("load_1min") is not None]
    busy = f", load {median(loads):.1f} (median of the 1-minute average before each run)" if loads else ""
    gpus = content["environment"]["gpus"]["devices"]
    yield (
        f"[{name}](benchmarks/{name}), {content['begun'][:10]}. {machine['cpus_usable']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {len(gpus) or 'no'} GPUs{busy}. "
        f"ridethrough {versions['ridethrough']}, Python {versions['python']}, torch {versions['torch']}.\n"
    )
    peers = content["environment"].get("peers") or {}
    for peer, found in peers.items():
        shown = ", ".join(f"{package} {version}" for package, version in found.items())
        yield f"- {peer}: {shown}"
    for row in content.get("missing", ()):
        yield f"- not measured: {row.get('mechanism') or row.get('mode')}: {row['error']}"
    yield ""


def _recovery(name: str, content: Content, made: Page) -> Iterator[str]:
    size = content["environment"]["workload"]
    yield f"### Recovery ({size['world_size']} ranks)\n"
    yield from _about(name, content)
    names = list(dict.fromkeys(row["mechanism"] for row in content["results"]))
    faults = [kind for kind in dict.fromkeys(row["fault"] for row in content["results"]) if kind != "node_loss"]
    yield (
        f"Seconds from the fault; median of the runs (gloo time-out {size['timeout_s']:g} s, saves every "
        f"{size['save_every']} steps, schedule `{content['schedule_hash']}`). Detected: the first other rank left "
        "or was ended. Goodput is of a job of a few seconds: it ranks, it does not foretell. Infrastructure "
        "goodput counts `init` as up: imports that a started script does inside it (each time) are up, those that "
        "ridethrough does before it (once) are not.\n"
    )
    command = f"ridethrough bench recovery --mechanisms {','.join(names)} --faults {','.join(faults)}"
    reps = 1 + max(row["rep"] for row in content["results"])
    sizes = f"--dim {size['dim']} --layers {size['layers']}"
    yield f"    {command} --reps {reps} {sizes}\n"
    table = recovery_table(content["results"])
    for fault in dict.fromkeys(row["fault"] for row in table):
        rows = [row for row in table if row["fault"] == fault]
        yield f"#### {fault}\n"
        header: tuple[str, ...] = (
            "mechanism",
            "recovered",
            "equal end",
            "detected",
            "all out",
            "first step",
            "p95",
            "p99",
            "max",
        )
        header += ("caught up", "load", "steps lost", "attempts", "failed", "new processes", "containers")
        header += ("training goodput", "infrastructure", "ratio")
        yield from _table(header, [_recovery_cells(row) for row in rows])
        firsts = [(row["mechanism"], row["first_step_s"]) for row in rows if row["first_step_s"]]
        drawn = [Bar(each, first["median"], first["max"], _ours(each)) for each, first in firsts]
        title = f"{fault}: from the fault to the first new step, median and longest"
        yield from made.plot(f"{Path(name).stem}-{fault}", title, drawn, "s")
    if "kubernetes-pods" in names:
        factor = f"{size['clock_factor']:g}"
        yield f"kubernetes-pods ran with the kubelet's clock {factor} times as fast, and gloo's limit of 60 s, too.\n"
    if any(row.get("network") == "namespaces" for row in content["results"]):
        yield "The nodes of ridethrough-node were each in a network namespace of their own.\n"
    for each in names:
        yield f"- {each}: {MECHANISMS[each].about}" if each in MECHANISMS else f"- {each}"
    yield ""


def _ours(name: str) -> bool:
    return name.startswith("ridethrough")


def _recovery_cells(row: Content) -> list[str]:
    first = row["first_step_s"]
    cells = [row["mechanism"], f"{row['recovered']}/{row['runs']}", f"{row['final_equal']}/{row['runs']}"]
    cells += [_number(row[key]["median"]) if row[key] else "-" for key in ("detected_s", "all_out_s")]
    cells += [_number(first[key]) if first else "-" for key in ("median", "p95", "p99", "max")]
    cells += [_number(row[key]["median"]) if row[key] else "-" for key in ("caught_up_s", "load_s")]
    counts = ("steps_lost", "attempts", "failed_attempts", "processes_replaced", "container_restarts")
    cells += [f"{row[key]:g}" if row[key] is not None else "-" for key in counts]
    cells += [f"{row[key]:.3f}" for key in ("training_goodput", "infrastructure_goodput")]
    return [*cells, f"{row['ratio']:.1f}" if row["ratio"] else "-"]


def _checkpoint(name: str, content: Content, made: Page) -> Iterator[str]:
    sweep = content["environment"]["sweep"]
    how = "waits, as for a GPU" if sweep["compute"] == "wait" else "keeps every rank's core busy"
    yield f"### Checkpoints (compute that {how})\n"
    yield from _about(name, content)
    throttle = f"; storage slowed to {sweep['storage_mbps']:g} MB/s" if sweep["storage_mbps"] else ""
    yield (
        f"A window is the time between two saves, in times of one `dcp.save`{throttle}. Efficiency is the wall of the "
        "same loop without saves over the wall with them, without the final drain; added is what a save adds to it. "
        "A row counts if the newest durable state was never older than two writes and an interval, and the last save "
        "loaded and was right.\n"
    )
    command = f"ridethrough bench checkpoint --compute {sweep['compute']} --modes {','.join(sweep['modes'])}"
    windows = ",".join(f"{window:g}" for window in sweep["windows"])
    sizes = ",".join(f"{size >> 20}" for size in sweep["state_bytes"])
    yield f"    {command} --windows {windows} --state-mb {sizes} --reps {sweep['reps']}\n"
    rows = [row for row in content["results"] if row["mode"] != "none"]
    for size in dict.fromkeys((row["world_size"], row["state_bytes"]) for row in rows):
        own = [row for row in rows if (row["world_size"], row["state_bytes"]) == size]
        yield f"#### {size[0]} ranks x {size[1] >> 20} MiB\n"
        header: tuple[str, ...] = (
            "mode",
            "window",
            "efficiency",
            "added s",
            "blocked s",
            "write s",
            "fresh s",
            "superseded",
            "load s",
        )
        header += ("host GB", "CPU s per GB", "counts")
        groups = _by_mode_and_window(own)
        yield from _table(header, [_checkpoint_cells(group) for group in groups])
        counted = [group for group in groups if not any(why_not(row) for row in group)]
        for window in dict.fromkeys(group[0]["window"] for group in groups):
            shown = [group for group in counted if group[0]["window"] == window]
            values = [(group[0]["mode"], median([row["efficiency"] for row in group])) for group in shown]
            title = f"a save every {window:g} write times: efficiency (rows that count)"
            drawn = [Bar(mode, value, ours=_ours(mode)) for mode, value in values]
            place = f"{Path(name).stem}-{size[0]}x{size[1] >> 20}-{window:g}"
            yield from made.plot(place, title, drawn, "", top=1.0)
    yield ""


def _by_mode_and_window(rows: Sequence[Content]) -> list[list[Content]]:
    groups: dict[tuple[float, str], list[Content]] = {}
    for row in rows:
        groups.setdefault((-row["window"], row["mode"]), []).append(row)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _checkpoint_cells(rows: Sequence[Content]) -> list[str]:
    def middle(key: str, scale: float = 1.0) -> str:
        values = [row[key] * scale for row in rows if row.get(key) is not None]
        return _number(median(values)) if values else "-"

    keys = ("efficiency", "added_s_per_save", "blocked_s_per_save", "write_s", "freshness_s", "superseded", "load_s")
    reasons = [reason for row in rows if (reason := why_not(row)) is not None]
    cells = [rows[0]["mode"], f"{rows[0]['window']:g}x", *(middle(key) for key in keys), middle("host_bytes", 1e-9)]
    return [*cells, middle("cpu_s_per_gb"), f"{len(rows) - len(reasons)}/{len(rows)}"]


def _gpu(name: str, content: Content, made: Page) -> Iterator[str]:
    asked, devices = content["environment"]["bench"], content["environment"]["gpus"]["devices"]
    yield f"### One GPU ({devices[0]['name'] if devices else 'none'}), NCCL with one rank, FSDP2\n"
    yield from _about(name, content)
    yield (
        "What a save costs is what it adds to the wall of its block of steps, beside blocks without saves before and "
        "after it in the same process; medians of the blocks. A block ends one interval after its last save.\n"
    )
    yield f"    ridethrough bench gpu --parts {','.join(asked['parts'])} --reps {asked['reps']}\n"
    for title, header, rows in tables(content["results"]):
        yield f"#### {title}\n"
        yield from _table(header, rows)


def _memory(name: str, content: Content, made: Page) -> Iterator[str]:
    asked = content["environment"]["bench"]
    yield "### The memory tier\n"
    yield from _about(name, content)
    yield (
        f"Forward and backward wait {asked['step_s']:g} s, AdamW's step is real. Blocks of {asked['steps']} steps with "
        f"and without snapshots, {asked['reps']} of each, in turn in one job; the slowest rank of each block, medians "
        "of the blocks.\n"
    )
    yield f"    ridethrough bench memory --state-mb {asked['state_mb']:g} --step-s {asked['step_s']:g}\n"
    for title, header, rows in memory_tables(content["results"]):
        yield f"#### {title}\n"
        yield from _table(header, rows)


def _simulation(name: str, content: Content, made: Page) -> Iterator[str]:
    yield "### Fleets on paper\n"
    yield (
        f"[{name}](benchmarks/{name}): nothing here was measured. The product's own generation machine, policy, "
        "kubelet rules and ledger run on simulated time. On one fleet all mechanisms meet the same failures at the "
        "same moments (Llama 3's rate and shares). The interval between saves is the best of those simulated, a "
        "quarter to four times Young's; Young's and Daly's stand beside it. `ridethrough simulate`.\n"
    )
    yield (
        "A case of your own need not assume: the times of your own runs replace the case's, as far as they were "
        "measured, and a run simulated with its own times has its own course (the section above, and a test).\n"
    )
    yield "    ridethrough calibrate run-1 run-2 --json own.json"
    yield "    ridethrough simulate --case case.json --calibration own.json\n"
    fleets = [row for row in content["results"] if row["group"] == "fleet"]
    header = ("GPUs", "days", "mechanism", "save every", "Young", "Daly", "training goodput", "infrastructure")
    cells = [
        [f"{row['num_gpus']:,}", f"{row['days']:g}", row["mechanism"], f"{row['interval']} steps"]
        + [str(row["young_steps"]), str(row["daly_steps"])]
        + [f"{row['training_goodput']:.4f}", f"{row['infrastructure_goodput']:.4f}"]
        + [str(sum(row["num_failures"].values())), str(row["steps_lost"]), str(row["spares_needed"])]
        for row in fleets
    ]
    yield from _table((*header, "failures", "steps lost", "spare nodes"), cells)
    for num_gpus in dict.fromkeys(row["num_gpus"] for row in fleets):
        own = [row for row in fleets if row["num_gpus"] == num_gpus]
        drawn = [Bar(r["mechanism"], 100 * (1 - r["training_goodput"]), ours=_ours(r["mechanism"])) for r in own]
        title = f"{num_gpus:,} GPUs: time that goes into no step that counts"
        yield from made.plot(f"{Path(name).stem}-{num_gpus}", title, drawn, "%")
    yield "#### What is assumed, and where it is from\n"
    for where, values in content["assumptions"].items():
        said = [[key, f"{each['value']:g} {each['unit']}".strip(), each["source"]] for key, each in values.items()]
        yield ("All fleets:\n" if where == "all" else f"{int(where):,} GPUs:\n")
        yield from _table(("value", "is", "source"), said)
    yield "#### The published recovery table\n"
    yield "16 GPUs, 2,000 steps, a save every 500 that takes 275 s, 5 faults, seed 42; by step times it could mean.\n"
    rows = [row for row in content["results"] if row["group"] == "recovery"]
    cells = [
        [
            f"{row['step_s']:g}",
            row["mechanism"],
            f"{row['training_goodput']:.1%}",
            f"{row['infrastructure_goodput']:.1%}",
        ]
        + [f"{row['wall_s']:.0f}", str(row["steps_lost"])]
        for row in rows
    ]
    yield from _table(("step s", "mechanism", "training goodput", "infrastructure", "wall s", "steps lost"), cells)
    yield "#### The published checkpoint table\n"
    rows = [row for row in content["results"] if row["group"] == "checkpoint"]
    cells = [[f"{row['step_s']:g}", str(row["interval"]), row["mechanism"], f"{row['efficiency']:.1%}"] for row in rows]
    yield from _table(("step s", "save every", "mode", "efficiency"), cells)
    yield "#### Where the published figures contradict themselves\n"
    for item in content["contradictions"]:
        yield f"- **{item['what']}** {item['arithmetic']}"
    yield ""


def _simulation_check(name: str, content: Content, made: Page) -> Iterator[str]:
    rows = content["rows"]
    agree, course = sum(row["agrees"] for row in rows), sum(row["course_agrees"] for row in rows)
    unsteady, wrong = sum(not row["repeats"] for row in rows), sum(row["repeats"] and not row["agrees"] for row in rows)
    yield "### The simulation against measured runs\n"
    yield (
        f"[{name}](benchmarks/{name}): each measured run foretold from the others of its kind; {agree} of "
        f"{len(rows)} states of a rank slot agree within 10 % or 0.5 s. In {unsteady} states the measured runs differ "
        "by more than that among themselves: that is the machine, which nothing foretells, neither other runs nor "
        f"`ridethrough calibrate`, whose medians are the same figures. Of the others {wrong} "
        "disagree; with each run's own times as inputs, so that only the course of the job counts, "
        f"{course} agree. The states that do not:\n"
    )
    cells = [
        [row["mechanism"], row["fault"], str(row["rep"]), row["state"]]
        + [f"{row['measured_s']:.2f}", f"{row['others_s']:.2f}", f"{row['simulated_s']:.2f}"]
        for row in rows
        if not row["agrees"]
    ]
    yield from _table(
        ("mechanism", "fault", "rep", "state", "measured s", "other runs s", "simulated s"),
        cells or [["none"] + [""] * 6],
    )
    yield ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


_SECTIONS: dict[str, Callable[[str, Content, Page], Iterator[str]]] = {
    "recovery": _recovery,
    "memory": _memory,
    "checkpoint": _checkpoint,
    "gpu": _gpu,
    "simulation": _simulation,
    "simulation-check": _simulation_check,
}
