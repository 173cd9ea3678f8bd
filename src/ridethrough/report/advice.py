"""What to change, from a run's own figures: each with its formula, its inputs and where the formula comes from. Pure.

    for item in advise(ledger, gpu_hour_price=3.0).items: print(item.name, item.value, item.formula, item.inputs)

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9). Daly 2006, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3). Hanley and Lippman-Hand 1983, "If
nothing goes wrong, is everything all right?", JAMA 249(13) (the rule of three).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridethrough.ledger.incidents import Incident, percentile
from ridethrough.ledger.steps import STATE_CODES
from ridethrough.ledger.summary import RunLedger
from ridethrough.report.saves import Saves, middle, saves
from ridethrough.report.timeouts import TimeLimit, time_limits

WRITE_SHARE_LIMIT = 0.8  # of the interval that the write may take
_SPARE_RISK = 0.01


@dataclass(frozen=True)
class Advice:
    """One figure. `value` is in `unit`; None: the run does not say, and `note` says what is missing."""

    name: str
    value: float | None
    unit: str
    formula: str
    inputs: dict[str, float | int | str | None]
    source: str
    note: str = ""
    warning: bool = False

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}


@dataclass
class Report:
    """All advice about a run; `limits` are the time-outs, `costs` what each class of incident cost."""

    items: list[Advice]
    limits: list[TimeLimit]
    costs: list[Cost]
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "advice": [item.as_json() for item in self.items],
            "time_limits": [limit.as_json() for limit in self.limits],
            "costs": [{"class": c.class_, **{k: v for k, v in vars(c).items() if k != "class_"}} for c in self.costs],
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Cost:
    """What the incidents of one class cost: ranks x seconds from the fault until the lost steps were done again."""

    class_: str
    count: int
    gpu_hours: float
    gpu_hours_each: float
    money: float | None


def advise(
    ledger: RunLedger,
    *,
    gpu_hour_price: float | None = None,
    node_repair_h: float = 4.0,
    replica_gbit_s: float = 100.0,
) -> Report:
    """`gpu_hour_price`: money per GPU hour; a rank counts as a GPU. `node_repair_h`: until a lost node is replaced by
    the operator. `replica_gbit_s`: of the network between two nodes, for the memory tier."""
    found = ledger.incidents
    kept = saves(ledger.events, now_ns=ledger.part.end_ns, step=0)
    mtbf_s, seen = mean_time_between_failures(ledger)
    step_s = _step_s(ledger)
    items = [
        _rate(ledger, mtbf_s, seen),
        *_interval(kept, mtbf_s, seen, step_s, ledger),
        _memory_tier(kept, step_s, replica_gbit_s),
        *_spares(ledger, found, node_repair_h),
    ]
    costs = _costs(found, ledger.part.slots, gpu_hour_price)
    items += _worth(ledger, kept, costs, gpu_hour_price)
    report = Report(items, time_limits([ledger]), costs)
    report.warnings = [item.note for item in items if item.warning] + _where_time_goes(ledger)
    return report


def mean_time_between_failures(ledger: RunLedger) -> tuple[float, int]:
    """Seconds of wall per incident, and how many there were. With none the wall / 3: with 95 % confidence the true
    one is not shorter (rule of three)."""
    wall_s, count = ledger.part.wall_ns / 1e9, len(ledger.incidents)
    return (wall_s / count if count else wall_s / 3), count


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Young 1974: the interval between saves that costs least, sqrt(2 d M)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, equation 37: sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + d / 18M) - d for d < 2M, else M."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def spares_needed(expected: float, risk: float = _SPARE_RISK) -> int:
    """The fewest spares so that more failures than that before they are replaced happen with a probability below
    `risk`; failures are Poisson with `expected` of them in the time that a replacement takes."""
    if expected > 1000:
        return math.ceil(expected + 2.33 * math.sqrt(expected))
    term = total = math.exp(-expected)
    count = 0
    while 1 - total > risk:
        count += 1
        term *= expected / count
        total += term
    return count


def _rate(ledger: RunLedger, mtbf_s: float, seen: int) -> Advice:
    wall_s = ledger.part.wall_ns / 1e9
    note = "" if seen >= 5 else f"from {seen} incidents only: the true value may be several times off"
    return Advice(
        "mean time between failures",
        mtbf_s,
        "s",
        "wall / incidents" if seen else "wall / 3 (no incident: 95 % lower bound)",
        {"wall_s": wall_s, "incidents": seen},
        "this run's ledger" if seen else "rule of three (Hanley and Lippman-Hand 1983)",
        note,
    )


def _interval(kept: Saves, mtbf_s: float, seen: int, step_s: float | None, ledger: RunLedger) -> list[Advice]:
    if not kept.num_committed or step_s is None:
        return [Advice("checkpoint interval", None, "steps", "", {}, "", "no save was committed in this run")]
    stall_s, write_s = save_cost_s(ledger, kept), percentile(kept.write_s or [0.0], 95)
    best_s = daly_s(stall_s, mtbf_s) if stall_s > 0 else 0.0
    window_s = write_s / WRITE_SHARE_LIMIT
    chosen_s = max(best_s, window_s, step_s)
    bound = "the write" if window_s >= max(best_s, step_s) else "the cost of a save" if best_s > step_s else "one step"
    inputs: dict[str, float | int | str | None] = {
        "added_s_per_save": stall_s,
        "write_p95_s": write_s,
        "mtbf_s": mtbf_s,
        "step_s": step_s,
        "young_s": young_s(stall_s, mtbf_s),
        "daly_s": best_s,
        "bounded_by": bound,
    }
    formula = (
        "max(daly(added, mtbf), write_p95 / 0.8, step) / step, with daly = sqrt(2dM)(1 + sqrt(d/2M)/3 + d/18M) - d"
    )
    advice = [
        Advice(
            "checkpoint interval",
            max(1, math.ceil(chosen_s / step_s)),
            "steps",
            formula,
            inputs,
            "Young 1974, Daly 2006; the overlap window: a save that takes longer than its interval is superseded",
            f"every {chosen_s:.3g} s; a failure then loses {chosen_s / 2:.3g} s on average at the disk tier",
        )
    ]
    interval_s = middle(kept.interval_s)
    if interval_s:
        share = write_s / interval_s
        too_long = share > WRITE_SHARE_LIMIT
        note = f"writes take {share:.0%} of the interval between saves"
        if too_long:
            note += ": storage can't keep up, save less often or write to faster storage"
        advice.append(
            Advice(
                "write time / interval",
                share,
                "",
                "write_p95 / median interval between committed saves",
                {"write_p95_s": write_s, "interval_p50_s": interval_s},
                "this run's save events",
                note,
                too_long,
            )
        )
    return advice


def save_cost_s(ledger: RunLedger, kept: Saves) -> float:
    """Seconds that a save adds to training: the blocked time, and what steps during its write took longer than the
    median step (rank 0's view; below a millisecond counts as none)."""
    table = ledger.steps.get(min(ledger.steps)) if ledger.steps else None
    blocked_s = float(ledger.part.states_ns["snapshot_stall"]) / 1e9 / ledger.part.slots / max(1, kept.num_committed)
    if table is None or len(table) < 2:
        return blocked_s
    took = (table.t1_ns - table.t0_ns) / 1e9
    median = float(np.median(took))
    during = np.zeros(len(table), bool)
    windows = 0
    for event in ledger.events:
        if event["kind"] == "save" and event.get("event") == "committed" and event.get("seconds"):
            begin = event["t_ns"] - round(event["seconds"] * 1e9)
            during |= (table.t1_ns > begin) & (table.t0_ns < event["t_ns"])
            windows += 1
            if windows >= 500:
                break
    if not during.any() or during.all():
        return blocked_s
    usual = took[~during]
    excess = float(np.mean(np.minimum(took[during], 10 * median)) - np.mean(np.minimum(usual, 10 * median)))
    added = excess * int(during.sum()) / max(1, min(kept.num_committed, windows))
    return blocked_s + (added if added > 0.001 else 0.0)


def _memory_tier(kept: Saves, step_s: float | None, replica_gbit_s: float) -> Advice:
    name, formula = "memory tier: replicate every", "ceil(bytes of a state x 8 / network / step)"
    if step_s is None or not kept.bytes:
        return Advice(name, None, "steps", formula, {}, "", "no save in this run: the size of its state is not known")
    seconds = kept.bytes * 8 / (replica_gbit_s * 1e9)
    k = max(1, math.ceil(seconds / step_s))
    return Advice(
        name,
        k,
        "steps",
        formula,
        {"state_bytes": kept.bytes, "network_gbit_s": replica_gbit_s, "step_s": step_s},
        "a replica is sent while the next ones wait; the whole state over one link is the worst case",
        f"loss of a node then costs at most {k + 1} steps, death of a process at most 1",
    )


def _spares(ledger: RunLedger, found: list[Incident], node_repair_h: float) -> list[Advice]:
    wall_s = ledger.part.wall_ns / 1e9
    launch_s = ledger.part.states_ns["launch"] / 1e9 / ledger.part.slots
    killed = sum(i.rung == "replace_process" for i in found)
    nodes = sum(i.class_ == "node_loss" or i.rung == "replace_node" for i in found)
    source = f"Poisson; more failures than spares before one is replaced with a probability below {_SPARE_RISK:.0%}"
    out = []
    for name, count, takes_s, what in (
        ("warm spare processes", killed, launch_s, "launch_s"),
        ("standby nodes", nodes, node_repair_h * 3600, "repair_s"),
    ):
        expected = count / wall_s * takes_s if wall_s else 0.0
        out.append(
            Advice(
                name,
                spares_needed(expected),
                "",
                "least n with P(Poisson(rate x time to replace) > n) < 0.01",
                {"replaced": count, "wall_s": wall_s, what: takes_s, "expected": expected},
                source,
                "" if count else "none was replaced in this run: 0 as far as it can tell",
            )
        )
    return out


def _costs(found: list[Incident], slots: int, price: float | None) -> list[Cost]:
    hours: dict[str, list[float]] = {}
    for i in found:
        if i.cost_s is not None:
            hours.setdefault(i.class_, []).append(slots * i.cost_s / 3600)
    costs = []
    for name, each in [*sorted(hours.items()), *([("all", [h for e in hours.values() for h in e])] if hours else [])]:
        total = sum(each)
        costs.append(Cost(name, len(each), total, total / len(each), total * price if price is not None else None))
    return costs


def _worth(ledger: RunLedger, kept: Saves, costs: list[Cost], price: float | None) -> list[Advice]:
    """What the same incidents would have cost if each had started the whole job anew from its last save on disk."""
    if not costs:
        return []
    part, count = ledger.part, costs[-1].count
    start_s = (part.states_ns["launch"] + part.states_ns["init"] / len(ledger.past.generations)) / 1e9 / part.slots
    back_s = (middle(kept.interval_s) or part.wall_ns / 1e9) / 2
    anew = count * part.slots * (start_s + back_s) / 3600
    saved = anew - costs[-1].gpu_hours
    stall = part.states_ns["snapshot_stall"] / 3.6e12
    money = f", {saved * price:,.2f} in money" if price is not None else ""
    verdict = "the set-up pays" if saved > stall else "starting anew would have been as cheap"
    return [
        Advice(
            "saved against starting the job anew",
            saved,
            "GPU hours",
            "incidents x ranks x (launch + init + interval / 2) - cost of the recoveries",
            {
                "incidents": count,
                "launch_and_init_s": start_s,
                "half_interval_s": back_s,
                "cost_gpu_h": costs[-1].gpu_hours,
                "stalled_by_saves_gpu_h": stall,
            },
            "this run's ledger; launch and init are those of its own start, without queueing",
            f"{verdict}{money}",
        )
    ]


def _where_time_goes(ledger: RunLedger) -> list[str]:
    part = ledger.part
    total = max(1, part.wall_ns * part.slots)
    said = []
    for state, limit, remedy in (
        ("data_wait", 0.03, "more loader workers, or data nearer to the machine"),
        ("snapshot_stall", 0.02, "asynchronous saves, or a longer interval"),
        ("eval", 0.1, "validate less often, or on fewer batches"),
        ("detect", 0.05, "a lower hang_factor (see time limits), if no step is ever that slow"),
        ("lost_step", 0.05, "a shorter checkpoint interval, or the memory tier"),
        ("launch", 0.1, "a longer run, or preloaded imports (--preload)"),
        ("rebuild", 0.05, "warm spares"),
    ):
        share = part.states_ns[state] / total
        if share > limit:
            said.append(f"{share:.1%} of the time is {state}: {remedy}")
    if part.warning:
        said.append(part.warning)
    return said


def _step_s(ledger: RunLedger) -> float | None:
    if not ledger.steps:
        return None
    table = ledger.steps[min(ledger.steps)]
    inside = table.part_state == STATE_CODES["eval"]
    took = (table.t1_ns - table.t0_ns) / 1e9
    if inside.any():
        rows = np.searchsorted(table.part_end, np.flatnonzero(inside), side="right")
        kept = np.ones(len(table), bool)
        kept[rows] = False
        took = took[kept] if kept.any() else took
    return float(np.median(took)) if len(took) else None
