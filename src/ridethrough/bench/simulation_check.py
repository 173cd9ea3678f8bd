"""The simulation against small runs that were measured: from the results of `bench recovery`.

Each measured run is predicted from the *other* runs of its mechanism and fault (their medians are the model's inputs;
for the launch, which no fault has a say in, over all faults); what the simulation adds is the course of the job:
which steps are lost, what happens when, how long it all takes. On a machine whose speed changes from run to run that
also measures the machine. Two figures tell the two apart: a state `repeats` if the measured runs agree among
themselves, and `course_s` is simulated with the run's own times as inputs, so that only the course can be wrong (a
weaker test, since a state's own seconds are among the inputs). A state agrees if it is within 10 % or half a second
of the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridethrough.bench.simulation import simulate
from ridethrough.bench.simulation_model import Fleet, Mechanism, Planned, Saving, Times
from ridethrough.bench.spread import median

RELATIVE = 0.10
ABSOLUTE_S = 0.5
_OF_RUNGS = ("ridethrough", "ridethrough-process", "ridethrough-node")
_LEFT_OUT = ("torchft", "kubernetes-pods")  # no common course: replicas go on alone, pods restart on their own
_KINDS = {"exit": "sigkill", "sigsegv": "sigkill", "sigstop": "hang"}


def check(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per run and state of one rank slot: `measured_s`, `others_s` (the median of the other runs),
    `simulated_s` and `course_s`, and whether they agree.

    Runs of which there is no other of the same mechanism and fault are left out, and those that ended badly.
    """
    size = result["environment"]["workload"]
    faults = {fault["id"]: fault for fault in result["schedule"]["faults"]}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in result["results"]:
        if run["error"] is None and run["first_step_s"] is not None and run["mechanism"] not in _LEFT_OUT:
            groups.setdefault((run["mechanism"], run["fault"]), []).append(run)
    rows: list[dict[str, Any]] = []
    for (mechanism, fault), runs in groups.items():
        for run in runs:
            others = [other for other in runs if other["rep"] != run["rep"]]
            alike = [
                other for (name, _), more in groups.items() if name == mechanism for other in more if other is not run
            ]
            if not others:
                continue
            planned = next(f for name, f in faults.items() if name.endswith(f"-{run['rep']}"))
            found = _simulated(mechanism, fault, others, alike, size, planned["step"])
            course = _simulated(mechanism, fault, [run], [run], size, planned["step"])
            for state in sorted({*found, *run["states_s"]}):
                measured_s = run["states_s"].get(state, 0.0) / size["world_size"]
                simulated_s, course_s = found.get(state, 0.0), course.get(state, 0.0)
                others_s = median([other["states_s"].get(state, 0.0) / size["world_size"] for other in others])
                limit_s = max(ABSOLUTE_S, RELATIVE * measured_s)
                rows.append(
                    {
                        "mechanism": mechanism,
                        "fault": fault,
                        "rep": run["rep"],
                        "state": state,
                        "measured_s": measured_s,
                        "others_s": others_s,
                        "repeats": abs(measured_s - others_s) <= limit_s,
                        "simulated_s": simulated_s,
                        "agrees": abs(measured_s - simulated_s) <= limit_s,
                        "course_s": course_s,
                        "course_agrees": abs(measured_s - course_s) <= limit_s,
                    }
                )
    return rows


def _simulated(
    mechanism: str,
    fault: str,
    others: Sequence[Mapping[str, Any]],
    alike: Sequence[Mapping[str, Any]],
    size: Mapping[str, Any],
    step: int,
) -> dict[str, float]:
    """Seconds of each state of one slot, from the medians of the other runs; what no fault has a say in from those of
    `alike`, the mechanism's runs under any fault."""

    def state(name: str, runs: Sequence[Mapping[str, Any]] = others) -> float:
        return median([run["states_s"].get(name, 0.0) / size["world_size"] for run in runs])

    def stage(name: str) -> float:
        return median([run["stages_s"].get(name, 0.0) for run in others])

    num_done = median([size["steps"] + run["steps_lost"] for run in others])
    num_saves = max(1, size["steps"] // size["save_every"])
    step_s = (state("step") + state("lost_step")) / num_done
    kind = _KINDS.get(fault, fault if fault in ("exception", "sigkill", "node_loss") else "hang")
    rung = {"sigkill": "replace_process", "node_loss": "replace_node"}.get(kind, "in_process")
    rebuild_s = {"all": stage("rebuild"), "in_process": stage("rebuild"), rung: stage("rebuild")}
    if rung != "in_process":
        rebuild_s["in_process"] = min(0.1, stage("rebuild"))
    times = Times(
        step_s=step_s,
        launch_s=state("launch", alike),
        init_s=state("init") / 2,
        restore_s=state("restore") / 2,
        finish_s=state("finish"),
        detect_s={kind: stage("detect")},
        teardown_s=stage("teardown"),
        rebuild_s=rebuild_s,
    )
    newest = (step - 1) // size["save_every"] * size["save_every"]
    in_time = median([run["resumed_at"] for run in others]) >= newest
    if mechanism in _OF_RUNGS:
        stall_s = state("snapshot_stall") / num_saves
        saving = Saving("supersede", size["save_every"], 0.0 if in_time else 1e6, stage_s=stall_s)
    else:
        saving = Saving("sync", size["save_every"], state("snapshot_stall") / num_saves)
    fleet = Fleet(
        size["world_size"],
        gpus_per_node=size["world_size"] // 2 if mechanism == "ridethrough-node" else size["world_size"],
        num_spares=int(mechanism == "ridethrough-node"),
        total_steps=size["steps"],
    )
    planned = [Planned(step, kind, into_s=min(state("partial_step"), step_s * 0.99))]
    outcome = simulate(fleet, Mechanism(mechanism, times, saving, rungs=mechanism in _OF_RUNGS), planned=planned)
    states = dict(outcome.states_s)
    if not in_time and mechanism in _OF_RUNGS:
        states["finish"] = state("finish")  # the write that was too late is not one of a million seconds
    return states
