"""Every budget, limit and rule of recovery in one typed table, and the decision that they lead to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.faults import FaultReport

Rung = Literal["in_process", "replace_process", "replace_node", "shrink", "give_up"]

_DEATHS = frozenset({"sigkill", "sigsegv", "exit", "signal", "oom", "gpu"})
# Deaths that somebody else caused say nothing about the step at which they struck.
_SAME_BEFORE_ANY_STEP = 2
_FROM_OUTSIDE = frozenset({"sigkill", "oom", "node_loss", "signal", "preemption"})


class Policy(BaseModel):
    """How a job recovers. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_restarts: int = Field(100, ge=0, description="Restarts of the whole job; 0 turns recovery off.")
    max_rank_faults: int = Field(20, ge=1, description="Faults with the same rank as root before giving up.")
    max_no_progress: int = Field(10, ge=1, description="Incidents in a row without a new best step.")
    max_same_fault: int = Field(
        3, ge=1, description="Times that the same own fault may strike at the same step before the job stops."
    )
    decide_after_s: float = Field(
        0.15,
        ge=0,
        description="A dead rank's report may come after its peers' errors: wait this long at most.",
    )
    interrupt_after_s: float = Field(
        0.2, ge=0, description="A thread that has not left by itself is interrupted after this time."
    )
    leave_limit_s: float = Field(
        2.0, gt=0, description="Who has not left by then is killed and replaced; grows with the world size."
    )
    rebuild_limit_s: float = Field(
        30.0, gt=0, description="Who is still making its process group by then is killed and replaced."
    )
    lease_s: float = Field(5.0, gt=0, description="A node that was not heard of for so long is lost.")
    node_wait_s: float = Field(
        300.0, ge=0, description="Wait for a node in a lost one's place before the world shrinks or the job ends."
    )
    last_call_s: float = Field(
        30.0, ge=0, description="With at least the least number of nodes, wait so long for more before starting."
    )
    coordinator_wait_s: float = Field(
        120.0, ge=0, description="How long workers train on without the coordinator before their agent stops them."
    )
    stop_grace_s: float = Field(
        10.0, gt=0, description="A planned stop (Ctrl-C, SIGTERM) that has not ended by then is cut off."
    )
    hang_floor_s: float = Field(1.0, gt=0, description="Lowest learned deadline of a step.")
    hang_factor: float = Field(4.0, gt=1, description="Deadline of a step: this times the 99th percentile.")
    first_step_limit_s: float = Field(600.0, gt=0, description="First step of a generation (compile).")
    init_limit_s: float = Field(600.0, gt=0, description="Building the model, until the first step.")
    load_limit_s: float = Field(900.0, gt=0, description="Finding and loading a state.")
    data_limit_s: float = Field(300.0, gt=0, description="Waiting for the loader in a step.")
    save_limit_s: float = Field(900.0, gt=0, description="Blocked in a save.")
    eval_limit_s: float = Field(900.0, gt=0, description="Validation.")
    finish_limit_s: float = Field(900.0, gt=0, description="From the last step to the function's return.")

    def leave_limit(self, world_size: int) -> float:
        """Limit of leaving, larger worlds get more: abort and teardown touch every peer."""
        return self.leave_limit_s * (1 + world_size / 1024)


class History(BaseModel):
    """What the decision depends on; changed only by `decide` and by progress. It travels with each plan, so that a
    coordinator that was started again goes on counting."""

    restarts: int = 0
    rank_faults: dict[int, int] = Field(default_factory=dict)
    same_fault: dict[str, int] = Field(default_factory=dict)
    no_progress: int = 0
    best_step: int = 0
    incidents: int = 0

    def progressed(self, step: int) -> None:
        if step > self.best_step:
            self.best_step = step
            self.no_progress = 0


@dataclass(frozen=True)
class Decision:
    rung: Rung
    why: str
    code: int = 0


def decide(policy: Policy, history: History, root: FaultReport, *, replaced: bool) -> Decision:
    """Charges the incident to its root and picks the rung; `replaced` says that some process is dead.

    Order: never retry what was declared fatal; then "the same again" and "no progress", which more attempts would not
    mend; then the budgets; then the cheapest rung that can work.
    """
    history.incidents += 1
    history.no_progress += 1
    where = f"rank {root.rank}" + (f" at step {root.step}" if root.step is not None else "")
    first_line = root.cause.splitlines()[0] if root.cause else root.fault_class
    if policy.max_restarts == 0:
        code = root.exit_code if root.exit_code else (128 + root.signal if root.signal else 1)
        return Decision("give_up", f"recovery is off (--max-restarts 0): {where}: {first_line}", code)
    if root.fatal == "policy":
        return Decision("give_up", f"not to be retried: {where}: {first_line}", 83)
    if root.fatal == "before_first_step":
        return Decision("give_up", f"failed before the first step, no progress: {where}: {first_line}", 81)
    if root.fault_class not in _FROM_OUTSIDE:
        key = f"{root.step or 0}:{root.fingerprint}"
        history.same_fault[key] = history.same_fault.get(key, 0) + 1
        if root.step is None and history.best_step == 0 and history.same_fault[key] >= _SAME_BEFORE_ANY_STEP:
            return Decision("give_up", f"failed before the first step, no progress: {where}: {first_line}", 81)
        if history.same_fault[key] >= policy.max_same_fault:
            return Decision("give_up", f"no progress: {where} failed {history.same_fault[key]} times: {first_line}", 81)
    if history.no_progress > policy.max_no_progress:
        return Decision(
            "give_up",
            f"no progress: {history.no_progress} incidents, no step beyond {history.best_step}; last: {first_line}",
            81,
        )
    if root.fault_class not in ("node_loss", "preemption"):
        history.restarts += 1
        if root.rank is not None:
            history.rank_faults[root.rank] = history.rank_faults.get(root.rank, 0) + 1
            if history.rank_faults[root.rank] > policy.max_rank_faults:
                return Decision("give_up", f"rank {root.rank} failed {history.rank_faults[root.rank]} times", 80)
        if history.restarts > policy.max_restarts:
            return Decision("give_up", f"{policy.max_restarts} restarts used up; last: {where}: {first_line}", 80)
    if root.fault_class == "node_loss":
        return Decision("replace_node", f"{root.node} is lost")
    if replaced or root.fault_class in _DEATHS:
        return Decision("replace_process", f"{where}: {first_line}")
    return Decision("in_process", f"{where}: {first_line}")
