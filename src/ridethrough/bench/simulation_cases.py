"""The published cases and the fleets that nobody can try, with every assumption said.

Sources. The reference: its checkpoint table (16 to 64 H100, Llama-3.1-8B, a write of about 275 s) and its recovery
table (16 H100, 2,000 steps, a save every 500, 5 faults, seed 42). Llama 3: "The Llama 3 Herd of Models", arXiv
2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from ridethrough.bench.simulation import Outcome, simulate
from ridethrough.bench.simulation_assumptions import COMMON, FLEETS, FleetModel, assumptions
from ridethrough.bench.simulation_model import (
    Fleet,
    Mechanism,
    Planned,
    Saving,
    Times,
    with_interval,
)
from ridethrough.faults.schedule import plan
from ridethrough.report.advice import daly_s, spares_needed, young_s

LLAMA3_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
# Table 5 there, by what has to be replaced: 58.7 % are GPUs, memory and other parts of a GPU, 11 % other hardware and
# maintenance: the node goes; 12.9 % software: an exception; the network and NCCL's watchdog, 10 %: somebody stands
# still; the rest: a process.
LLAMA3_SHARES = {"node_loss": 0.70, "exception": 0.13, "hang": 0.10, "sigkill": 0.07}

_DETECT = {"exception": 0.05, "sigkill": 0.1, "hang": 5.0, "node_loss": 5.0}


def published_faults(steps: int = 2000, world_size: int = 16) -> list[Planned]:
    """The reference's own schedule: 5 faults, seed 42, exception and hang by 0.6 and 0.4."""
    drawn = plan(42, 5, ("exception", "hang"), (0.6, 0.4), steps, world_size)
    return [Planned(fault.step, fault.kind, fault.rank) for fault in drawn.faults]


def recovery_cases() -> Iterator[dict[str, Any]]:
    """The published recovery table, with the mechanisms' published recovery times and ours as measured on H200 (a
    second and a half for an exception, with the model's build), at the step times that the publication implies."""
    for step_s in (0.06, 0.5, 2.8):
        published = {"save": Saving("wait", 500, 275.0), "none": Saving("supersede", 500, 275.0, memory_every=1)}
        for name, recovery_s, pods in (("in-process", 10, False), ("ft_launcher", 17, False), ("pods", 270, True)):
            # The published time is from the fault to training again; the kubelet's waits are in it.
            times = Times(step_s, rebuild_s={"all": float(recovery_s)})
            mechanism = Mechanism(name, times, published["save"])
            yield _case("recovery", mechanism, step_s, pods=pods)
        ours = Times(step_s, init_s=0.1, detect_s=_DETECT, teardown_s=0.1, rebuild_s=_rungs(1.0))
        yield _case("recovery", Mechanism("ridethrough", ours, published["none"], rungs=True), step_s)
        without = replace(published["none"], memory_every=0)
        yield _case("recovery", Mechanism("ridethrough, no memory tier", ours, without, rungs=True), step_s)


def _case(group: str, mechanism: Mechanism, step_s: float, pods: bool = False) -> dict[str, Any]:
    fleet = Fleet(16, total_steps=2000)
    outcome = simulate(fleet, mechanism, planned=published_faults())
    return {"group": group, "step_s": step_s, "interval": mechanism.saving.interval, **outcome.as_json()}


def checkpoint_cases() -> Iterator[dict[str, Any]]:
    """The published checkpoint table: efficiency without faults, by interval, at both step times that it implies."""
    for step_s in (0.47, 2.8):
        for interval in (100, 200, 500, 1000):
            for mode, write_s in (("sync", 275.0), ("wait", 275.0), ("supersede", 275.0)):
                times = Times(step_s)
                outcome = simulate(Fleet(64, total_steps=4000), Mechanism(mode, times, Saving(mode, interval, write_s)))
                useful = outcome.states_s["step"]
                efficiency = useful / (useful + outcome.states_s.get("snapshot_stall", 0.0))
                row = {"group": "checkpoint", "step_s": step_s, "interval": interval, "efficiency": efficiency}
                yield {**row, **outcome.as_json()}


def _rungs(scale_s: float) -> dict[str, float]:
    return {"in_process": scale_s, "replace_process": 2 * scale_s, "replace_node": 4 * scale_s}


def fleet_cases(days: float | None = None, seed: int = 42) -> Iterator[dict[str, Any]]:
    """Each mechanism on each fleet at Llama 3's failure rate, all under the same failures, at the best of the intervals
    around Young's; and the spare nodes that leave a lost one waiting in less than 1 % of the cases."""
    for model in FLEETS:
        fleet, spares = llama3_fleet(model, days or model.days)
        for mechanism in fleet_mechanisms(model):
            best, intervals = best_interval(fleet, mechanism, seed)
            yield {
                "group": "fleet",
                "days": days or model.days,
                "step_s": model.step_s,
                "mtbf_s": fleet.mtbf_s,
                "spares_needed": spares,
                **intervals,
                **best.as_json(),
            }


def llama3_fleet(model: FleetModel, days: float) -> tuple[Fleet, int]:
    """The fleet with Llama 3's failure rates and the spare nodes that it needs."""
    rates = {kind: LLAMA3_PER_GPU_HOUR * share for kind, share in LLAMA3_SHARES.items()}
    repair_s, group = COMMON["repair_s"].value, 1 if model.num_gpus <= 1_024 else 8
    spares = spares_needed(rates["node_loss"] * model.num_gpus / 3600 * repair_s)
    fleet = Fleet(model.num_gpus, rates=rates, group=group, horizon_s=days * 86_400, repair_s=repair_s)
    return replace(fleet, num_spares=spares), spares


def fleet_mechanisms(model: FleetModel) -> Iterator[Mechanism]:
    """Ours with and without the memory tier, and the peers' ways, on one fleet. All make the same groups; all ranks
    read a checkpoint at once."""
    common = {name: assumed.value for name, assumed in COMMON.items()}
    write_s = read_s = model.state_gb / model.storage_gb_s.value
    step_s, group_s = model.step_s, model.group_s.value
    ours = Times(
        step_s,
        launch_s=common["job_restart_s"],
        restore_s=common["memory_restore_s"],
        detect_s={
            "exception": common["detect_exception_s"],
            "sigkill": common["detect_sigkill_s"],
            "hang": common["detect_hang_steps"] * step_s,
            "node_loss": common["detect_node_loss_s"],
        },
        teardown_s=common["teardown_s"],
        rebuild_s={
            "in_process": group_s,
            "replace_process": group_s + common["replace_process_extra_s"],
            "replace_node": group_s + common["replace_node_extra_s"],
        },
    )
    lag = int(common["replica_lag_steps"])
    saving = Saving("supersede", 1, write_s, stage_s=common["save_stall_s"], memory_every=1, replica_lag=lag)
    yield Mechanism("ridethrough", ours, saving, rungs=True)
    without = replace(ours, restore_s=read_s)
    yield Mechanism("ridethrough, no memory tier", without, replace(saving, memory_every=0), rungs=True)
    soon, late = common["peer_detect_exception_s"], common["peer_detect_hang_s"]
    detect_s = {"exception": soon, "sigkill": soon, "hang": late, "node_loss": late}
    everything = replace(without, detect_s=detect_s, teardown_s=common["peer_teardown_s"])
    launcher = replace(everything, rebuild_s={"all": group_s + common["launcher_restart_s"]})
    asynchronous = Saving("wait", 1, write_s, stage_s=common["peer_save_stall_s"])
    yield Mechanism("launcher, asynchronous saves", launcher, asynchronous)
    anew = replace(everything, rebuild_s={"all": group_s + common["job_restart_s"]})
    yield Mechanism("job started anew, asynchronous saves", anew, asynchronous)
    yield Mechanism("pods, blocking saves", anew, Saving("sync", 1, write_s), pods=True)


def best_interval(fleet: Fleet, mechanism: Mechanism, seed: int) -> tuple[Outcome, dict[str, Any]]:
    """The run with the best of the intervals that are a quarter to four times Young's (each simulated), and what
    Young's and Daly's formulas say, in steps. One that the write does not fit into is no candidate."""
    saving, step_s = mechanism.saving, mechanism.times.step_s
    stall_s = saving.stage_s + (saving.write_s if saving.mode == "sync" else 0.0)
    by_formula_s = {"young_steps": young_s(stall_s, fleet.mtbf_s), "daly_steps": daly_s(stall_s, fleet.mtbf_s)}
    formulas = {name: max(1, round(seconds / step_s)) for name, seconds in by_formula_s.items()}
    least = 1 if saving.mode == "sync" else max(1, math.ceil(saving.write_s / step_s))
    candidates = sorted({max(least, round(formulas["young_steps"] * factor)) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)})
    runs = {every: simulate(fleet, with_interval(mechanism, every), seed) for every in candidates}
    best = max(runs, key=lambda every: runs[every].training_goodput)
    goodputs = {str(every): run.training_goodput for every, run in runs.items()}
    return runs[best], {"interval": best, "goodput_by_interval": goodputs, **formulas}


def contradictions() -> list[dict[str, Any]]:
    """Where the published figures contradict each other, with the arithmetic."""
    rows = [("in-process", 10, 0.31, 0.87), ("ft_launcher", 17, 0.255, 0.859), ("Kubernetes alone", 270, 0.115, 0.358)]
    implied = []
    for name, recovery_s, training, infrastructure in rows:
        wall_s = 5 * recovery_s / (1 - infrastructure)
        implied.append({"mechanism": name, "wall_s": wall_s, "useful_s": wall_s * training})
        implied[-1]["step_s"] = wall_s * training / 2000
    texts = "; ".join(f"{r['mechanism']}: wall {r['wall_s']:.0f} s, step {r['step_s']:.3f} s" for r in implied)
    sync_100 = 275 * 0.147 / (1 - 0.147) / 100
    sync_1000 = 275 * 0.603 / (1 - 0.603) / 1000
    return [
        {
            "what": "The three rows of the recovery table train at different speeds.",
            "arithmetic": "If all time that is not infrastructure goodput is the 5 recoveries, the wall is 5 x "
            f"recovery / (1 - infrastructure goodput), and 2,000 useful steps take training goodput x wall: {texts}. "
            "The same model on the same machines needs the same time for a step.",
            "values": implied,
        },
        {
            "what": "Blocking saves at every 100 and at every 1,000 steps do not have one write time.",
            "arithmetic": "Efficiency is compute / (compute + write). With a write of 275 s, 14.7 % at every 100 steps "
            f"means {sync_100:.2f} s a step, 60.3 % at every 1,000 means {sync_1000:.2f} s a step; with the stated "
            f"100 steps in 280 s they would be {280 / (280 + 275):.1%} and {2800 / (2800 + 275):.1%}.",
            "values": {"step_s_at_100": sync_100, "step_s_at_1000": sync_1000},
        },
        {
            "what": "Asynchronous saves at every 100 steps are worse than their own description allows.",
            "arithmetic": "If 100 steps take 280 s and a write 275 s, each write is over before the next save, so "
            "efficiency is near 1; published are 29.6 %. If a step takes "
            f"{sync_100:.2f} s as the blocking row implies, a save every {100 * sync_100:.0f} s waits for a write of "
            f"275 s and efficiency is {100 * sync_100 / 275:.1%}, again not 29.6 %.",
            "values": {"efficiency_if_wait": 100 * sync_100 / 275},
        },
        {
            "what": "The recovery table's steps are no steps of the checkpoint table.",
            "arithmetic": f"{implied[0]['step_s']:.2f} to {implied[2]['step_s']:.2f} s there, "
            f"{sync_1000:.2f} to 2.80 s here, both for 2,000-step runs of the same 8 B model.",
            "values": {},
        },
    ]


def all_cases(days: float | None = None, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Everything, as the JSON of `ridethrough simulate`. `days` of every large fleet; None: each its own. `tell` gets a
    line per case."""
    results = []
    for row in chain(checkpoint_cases(), recovery_cases(), fleet_cases(days)):
        results.append(row)
        where = f"{row['group']}, {row['num_gpus']:,} GPUs, {row['mechanism']}"
        tell(f"case {len(results)}: {where}: training goodput {row['training_goodput']:.3f}")
    return {
        "kind": "simulation",
        "schedule": [asdict(fault) for fault in published_faults()],
        "results": results,
        "assumptions": assumptions(),
        "contradictions": contradictions(),
    }
