"""Charges an incident to its root and picks the rung of the ladder: the cheapest that can work."""

from __future__ import annotations

from dataclasses import dataclass

from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.history import History
from ridethrough.generation.policy import Policy
from ridethrough.ledger.schema import Rung

# A process of these classes is dead, or can not be used again.
_PROCESS_GONE = frozenset({"sigkill", "sigsegv", "exit", "signal", "oom", "gpu"})
# Deaths that somebody else caused say nothing about the step at which they struck.
_FROM_OUTSIDE = frozenset({"sigkill", "oom", "node_loss", "signal", "preemption"})
_NOT_CHARGED = frozenset({"node_loss", "preemption"})


@dataclass(frozen=True)
class Decision:
    """`code` is the job's exit code, with the rung `give_up`. `replace_root`: with the rung `replace_process`, the
    root's own process has to go; else only those have that are dead already."""

    rung: Rung
    why: str
    code: int = 0
    replace_root: bool = False


def decide(
    policy: Policy,
    history: History,
    root: FaultReport,
    *,
    now_s: float,
    replaced: bool,
    can_replace_node: bool,
) -> Decision:
    """`replaced`: some process is dead already. `can_replace_node`: a standby node could take the root's place.

    Order: never retry what was declared fatal; then "the same again" and "no progress", which more attempts would not
    mend; then the budgets; then the rung.
    """
    history.incidents += 1
    history.no_progress += 1
    history.best_at_incident = history.best_step
    end = _hopeless(policy, history, root)
    if end is not None:
        return end
    replace_root = _count_streak(policy, history, root)
    rung = _rung(policy, history, root, replaced=replaced or replace_root, can_replace_node=can_replace_node)
    if root.fault_class not in _NOT_CHARGED:
        end = _charge(policy, history, root, now_s, costly=rung != "in_process")
        if end is not None:
            return end
    why = f"{root.node} is gone" if root.fault_class in _NOT_CHARGED else f"{_where(root)}: {root.first_line}"
    return Decision(rung, why, replace_root=replace_root and rung == "replace_process")


def _where(root: FaultReport) -> str:
    return f"rank {root.rank}" + (f" at step {root.step}" if root.step is not None else "")


def _hopeless(policy: Policy, history: History, root: FaultReport) -> Decision | None:
    what = f"{_where(root)}: {root.first_line}"
    if policy.max_restarts == 0:
        code = root.exit_code if root.exit_code else (128 + root.signal if root.signal else 1)
        return Decision("give_up", f"recovery is off (--max-restarts 0): {what}", code)
    if root.fatal == "policy" or root.exception.rpartition(".")[2] in policy.never_retry:
        return Decision("give_up", f"not to be retried: {what}", ExitCode.FATAL)
    if root.fatal == "before_first_step":
        return Decision("give_up", f"failed before the first step, no progress: {what}", ExitCode.NO_PROGRESS)
    if root.fault_class not in _FROM_OUTSIDE:
        end = _same_again(policy, history, root)
        if end is not None:
            return end
    if history.no_progress > policy.max_no_progress:
        return Decision(
            "give_up",
            f"no progress: {history.no_progress} incidents, no step beyond {history.best_step}; last: {what}",
            ExitCode.NO_PROGRESS,
        )
    return None


def _same_again(policy: Policy, history: History, root: FaultReport) -> Decision | None:
    """The second failure at one step makes the next generation resume from an older state; the third ends the job."""
    key = f"{root.step or 0}:{root.fingerprint}"
    times = history.same_fault[key] = history.same_fault.get(key, 0) + 1
    what = f"{_where(root)}: {root.first_line}"
    if root.step is None and history.best_step == 0 and times >= policy.max_same_before_any_step:
        return Decision("give_up", f"failed before the first step, no progress: {what}", ExitCode.NO_PROGRESS)
    if times >= policy.max_same_fault:
        return Decision("give_up", f"no progress: the same {times} times: {what}", ExitCode.NO_PROGRESS)
    if times > 1:
        base = root.resumed_at if root.resumed_at is not None else (root.step or 0) - 1
        if base > 0:
            history.older_than = base
    return None


def _count_streak(policy: Policy, history: History, root: FaultReport) -> bool:
    """Whether the root's process can not be used again."""
    if root.fault_class in _NOT_CHARGED:
        return False
    history.streak = history.streak + 1 if root.rank is not None and root.rank == history.last_rank else 1
    history.last_rank = root.rank
    return root.fault_class in _PROCESS_GONE or history.streak >= policy.replace_process_after


def _rung(policy: Policy, history: History, root: FaultReport, *, replaced: bool, can_replace_node: bool) -> Rung:
    if root.fault_class in _NOT_CHARGED or (history.streak >= policy.replace_node_after and can_replace_node):
        return "replace_node"
    return "replace_process" if replaced else "in_process"


def _charge(policy: Policy, history: History, root: FaultReport, now_s: float, *, costly: bool) -> Decision | None:
    history.restarts += 1
    kind, budget = ("costly", policy.max_costly_in_window) if costly else ("cheap", policy.max_cheap_in_window)
    times_s = history.costly_s if costly else history.cheap_s
    times_s[:] = [*(t for t in times_s if t > now_s - policy.window_s), now_s]
    over = ""
    if root.rank is not None:
        faults = history.rank_faults[root.rank] = history.rank_faults.get(root.rank, 0) + 1
        if faults > policy.max_rank_faults:
            over = f"rank {root.rank} failed {faults} times"
    if len(times_s) > budget:
        over = f"{len(times_s)} {kind} restarts within {policy.window_s:.0f} s, {budget} allowed"
    if history.restarts > policy.max_restarts:
        over = f"{policy.max_restarts} restarts used up"
    if not over:
        return None
    return Decision("give_up", f"{over}; last: {_where(root)}: {root.first_line}", ExitCode.RESTARTS_EXHAUSTED)
