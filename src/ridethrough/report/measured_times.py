"""How long each part of a job takes, from measured runs: what a simulation takes in place of assumptions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ridethrough.ledger.incidents import Incident
from ridethrough.ledger.summary import RunLedger

# Class of an incident -> the class of the simulation that it is like.
_LIKE = {"sigsegv": "sigkill", "signal": "sigkill", "exit": "sigkill", "oom": "sigkill", "gpu": "exception"}
_SIMULATED = ("exception", "hang", "sigkill", "node_loss")
_RUNGS = ("in_process", "replace_process", "replace_node")


def measured_times(ledgers: Sequence[RunLedger]) -> dict[str, Any]:
    """The `times` of a case of `ridethrough simulate`, in seconds: medians over steps, runs and recovered incidents.

    `init_s` and `restore_s` are per generation, over all ranks and generations. What was not seen is left out.
    """
    steps = [(table.t1_ns - table.t0_ns) / 1e9 for ledger in ledgers for table in ledger.steps.values() if len(table)]
    if not steps:
        return {}
    step_s = float(np.median(np.concatenate(steps)))
    found = [incident for ledger in ledgers for incident in ledger.incidents if incident.recovered]
    times: dict[str, Any] = {"step_s": step_s}
    times |= {f"{name}_s": _median(_per_slot(ledger, name) for ledger in ledgers) for name in ("launch", "finish")}
    for state in ("init", "restore"):
        each = (_per_slot(ledger, state) / len(ledger.past.generations) for ledger in ledgers)
        times[f"{state}_s"] = _median(each)
    if found:
        times["first_step_s"] = max(0.0, _stage(found, "first_step") - step_s)
        times["teardown_s"] = _stage(found, "teardown")
        detect = {kind: [i for i in found if _LIKE.get(i.class_, i.class_) == kind] for kind in _SIMULATED}
        times["detect_s"] = {kind: _stage(some, "detect") for kind, some in detect.items() if some}
        rebuild = {rung: [i for i in found if i.rung == rung] for rung in _RUNGS}
        times["rebuild_s"] = {rung: _stage(some, "rebuild") for rung, some in rebuild.items() if some}
    return times


def _per_slot(ledger: RunLedger, state: str) -> float:
    return ledger.part.states_ns.get(state, 0) / ledger.part.slots / 1e9


def _stage(found: Iterable[Incident], stage: str) -> float:
    return _median(incident.stages_s.get(stage, 0.0) for incident in found)


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))
