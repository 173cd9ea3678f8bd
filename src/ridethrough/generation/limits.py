"""Limits inside limits: an outer watchdog must not fire while the inner one still waits."""

from __future__ import annotations

from ridethrough.generation.policy import Policy

# From the innermost to the outermost: what sees a rank stand still, what its peers wait for, a whole restart inside the
# processes, the launcher's patience, and whoever ends the launcher.
_CHAIN = ("heartbeat_timeout_s", "collective_timeout_s", "in_process_limit_s", "stop_grace_s", "pod_grace_s")

NESTING: tuple[tuple[str, str], ...] = (
    *((inner, outer) for i, inner in enumerate(_CHAIN) for outer in _CHAIN[i + 1 :]),
    ("heartbeat_s", "lease_s"),
    ("interrupt_after_s", "leave_limit_s"),
    ("gate_limit_s", "leave_limit_s"),
    ("abort_limit_s", "leave_limit_s"),
    ("leave_limit_s", "kill_limit_s"),
    ("lease_s", "kill_limit_s"),
    ("leave_limit_s", "rebuild_limit_s"),
    ("leave_limit_s", "stop_grace_s"),
    ("hang_floor_s", "collective_timeout_s"),
    ("learn_limit_s", "coordinator_wait_s"),
)
"""Pairs of names (inner, outer), the inner one must be the shorter: settings of `Policy`, or limits from around it.

`heartbeat_s`: beats of the agents. `heartbeat_timeout_s`: the launcher's for scripts without `rt.run`.
`collective_timeout_s`: the process groups' own. `in_process_limit_s`: a whole attempt to restart inside the processes.
`pod_grace_s`: `terminationGracePeriodSeconds`, or whatever kills the launcher in the end.
"""


def check_limits(policy: Policy, **outer: float) -> list[str]:
    """One line for each wrong pair, with both names and values; empty if all fit. Seconds.

    `outer` gives the limits that the policy doesn't hold; they may also replace the policy's. A pair is looked at only
    if both are known, and only names that are in `NESTING` are taken: others raise ValueError.
    """
    names = {name for pair in NESTING for name in pair}
    unknown = sorted(set(outer) - names)
    if unknown:
        raise ValueError(f"no such limit: {', '.join(unknown)}; known are {', '.join(sorted(names))}")
    known: dict[str, float] = {name: getattr(policy, name) for name in names if name in Policy.model_fields}
    known.update(outer)
    return [
        f"{inner} ({known[inner]:g} s) must be below {outer_name} ({known[outer_name]:g} s): "
        f"{outer_name} would fire while {inner} still waits"
        for inner, outer_name in NESTING
        if inner in known and outer_name in known and known[inner] >= known[outer_name]
    ]
