"""Every budget, limit and rule of recovery in one typed table.

`python -m ridethrough.generation.policy` prints it; with docs/policy.md as argument it brings that table up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_HEAD = "| setting | default | what it does |"
_PER_DOUBLING = 1024  # ranks: a limit that grows is twice as long with so many, three times with twice as many

HealthCheck = Literal["ecc", "nvlink", "recovery_action", "nic", "memory", "disk", "user"]
"""Checks that a rank makes before it enters another generation; `user` is the `check` given to `rt.run`."""


class Policy(BaseModel):
    """How a job recovers. Times in seconds; 0 turns a rule off where its description says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # --- what ends the job -------------------------------------------------------------------------------------------
    max_restarts: int = Field(
        100,
        ge=0,
        description="Incidents of the whole job but node loss and preemption; 0 turns recovery off.",
    )
    max_rank_faults: int = Field(20, ge=1, description="Charged incidents with the same rank as root.")
    window_s: float = Field(3600.0, gt=0, description="The time window of the next two budgets.")
    max_cheap_in_window: int = Field(
        100, ge=1, description="Charged incidents in the window that no process had to be replaced for."
    )
    max_costly_in_window: int = Field(
        50, ge=1, description="Charged incidents in the window that a process or node was replaced for."
    )
    forgive_after_steps: int = Field(
        0, ge=0, description="After so many new best steps without an incident the job's count starts anew; 0: never."
    )
    max_no_progress: int = Field(
        10, ge=1, description="Incidents in a row without a new best step, whatever their class."
    )
    max_same_fault: int = Field(
        3,
        ge=1,
        description="Times that the same own fault may strike at one step before the job stops. From the second on an "
        "older state is loaded. Comes before every budget.",
    )
    max_same_before_any_step: int = Field(
        2, ge=1, description="The same, as long as the job has never finished a step."
    )
    never_retry: tuple[str, ...] = Field(
        (
            "KeyboardInterrupt",
            "SystemExit",
            "ImportError",
            "ModuleNotFoundError",
            "SyntaxError",
            "Fatal",
            "StorageFull",
            "StateMismatch",
        ),
        description="Exceptions that end the job at once; every other one may be restarted. StorageFull is a save that "
        'met a full disk or quota (`Checkpointer(on_error="warn")` trains on without saves), StateMismatch a state '
        "of another model.",
    )

    # --- who is replaced ---------------------------------------------------------------------------------------------
    replace_process_after: int = Field(
        2, ge=1, description="Incidents with the same rank as root and no progress between: its process is replaced."
    )
    replace_node_after: int = Field(
        3, ge=1, description="The same, its node gives its place to a standby node, if there is one."
    )
    evict_on: tuple[HealthCheck, ...] = Field(
        ("ecc", "nvlink", "recovery_action", "nic"),
        description="Health checks whose FAIL takes the node out: its place goes to a standby node, if there is one, "
        "else the process is replaced. UNAVAILABLE takes nobody out. The checks: `ecc`, `nvlink`, `recovery_action` "
        "(the driver's), `nic`, `memory`, `disk`, `user`.",
    )
    replace_process_on: tuple[HealthCheck, ...] = Field(
        ("user",), description="Health checks whose FAIL takes the process out. Any other FAIL is only recorded."
    )
    cordon_after: int = Field(
        2,
        ge=0,
        description="A host lost, or replaced as guilty, so often is not used again; 0: never.",
    )
    cordon_window_s: float = Field(86400.0, gt=0, description="The time window of `cordon_after`.")

    # --- leaving and coming back -------------------------------------------------------------------------------------
    decide_after_s: float = Field(
        0.15,
        ge=0,
        description="After a death among processes that are starting: wait so long for the reports that explain it.",
    )
    interrupt_after_s: float = Field(
        0.2, ge=0, description="A thread that has not left by itself is interrupted after this time."
    )
    gate_limit_s: float = Field(
        1.0, gt=0, description="Limit of each check before a process may enter again; one that takes longer has failed."
    )
    abort_limit_s: float = Field(
        1.5, gt=0, description="Aborting a process group; then the process is replaced. Grows with the world."
    )
    leave_limit_s: float = Field(
        2.0, gt=0, description="Who has not left by then is killed and replaced. Grows with the world."
    )
    kill_limit_s: float = Field(
        15.0, gt=0, description="A process that is not gone so long after its SIGKILL costs its node the place."
    )
    rebuild_limit_s: float = Field(
        10.0,
        gt=0,
        description="Who is still making its process group by then is killed and replaced. Grows with the world, and "
        "is at least four times the longest so far.",
    )
    start_limit_s: float = Field(
        600.0, gt=0, description="From a process's start to its `rt.run`, while others wait for it there."
    )
    store_limit_s: float = Field(15.0, gt=0, description="A node that has not opened the store by then: the next one.")

    # --- nodes -------------------------------------------------------------------------------------------------------
    lease_s: float = Field(5.0, gt=0, description="A node that was not heard of for so long is lost.")
    node_wait_s: float = Field(
        300.0, ge=0, description="Wait for a node in a lost one's place before the world shrinks or the job ends."
    )
    majority: bool = Field(
        False,
        description="Plan only with more than half of the last plan's nodes: where coordinators share no run folder.",
    )
    join_limit_s: float = Field(600.0, gt=0, description="At the start: wait so long for the least number of nodes.")
    last_call_s: float = Field(
        30.0, ge=0, description="With at least the least number of nodes, wait so long for more before starting."
    )
    grow_after_s: float = Field(
        10.0, ge=0, description="A shrunken world takes newcomers in when none has come for so long, or it has all."
    )
    grow_limit_s: float = Field(
        600.0, gt=0, description="The last step and save before it grows; longer, and it grows without."
    )
    coordinator_wait_s: float = Field(
        120.0, ge=0, description="How long workers train on without the coordinator before their agent stops them."
    )
    learn_limit_s: float = Field(
        10.0, gt=0, description="A coordinator that was started again waits so long for the nodes of the plan."
    )
    stop_grace_s: float = Field(
        10.0, gt=0, description="A planned stop (Ctrl-C, SIGTERM) that has not ended by then is cut off."
    )

    # --- hangs -------------------------------------------------------------------------------------------------------
    hang_floor_s: float = Field(1.0, gt=0, description="Lowest learned deadline of a step.")
    hang_factor: float = Field(4.0, gt=1, description="Deadline of a step: this times the 99th percentile.")
    first_step_limit_s: float = Field(600.0, gt=0, description="First step of a generation (compile).")
    init_limit_s: float = Field(600.0, gt=0, description="Building the model, until the first step.")
    load_limit_s: float = Field(900.0, gt=0, description="Finding and loading a state.")
    data_limit_s: float = Field(300.0, gt=0, description="Waiting for the loader in a step.")
    save_limit_s: float = Field(900.0, gt=0, description="Blocked in a save.")
    eval_limit_s: float = Field(900.0, gt=0, description="Validation.")
    finish_limit_s: float = Field(900.0, gt=0, description="From the last step to the function's return.")
    heartbeat_limit_s: float = Field(
        900.0, gt=0, description="Between two calls of rt.heartbeat() in a script without rt.run."
    )
    first_heartbeat_limit_s: float = Field(
        0.0,
        ge=0,
        description="From a process's start to its first rt.heartbeat(), in a script without rt.run; 0: none.",
    )
    observe: bool = Field(False, description="Hangs are judged and recorded, but nobody is made to leave.")

    def changed(self) -> dict[str, Any]:
        """The settings that are not the default, as JSON has them."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def abort_limit(self, world_size: int) -> float:
        """Seconds for aborting all process groups."""
        return self.abort_limit_s * (1 + world_size / _PER_DOUBLING)

    def leave_limit(self, world_size: int) -> float:
        """Seconds for leaving: abort and teardown touch every peer, so larger worlds get more."""
        return self.leave_limit_s * (1 + world_size / _PER_DOUBLING)

    def rebuild_limit(self, world_size: int, longest_s: float = 0.0) -> float:
        """Seconds for making the process group; `longest_s` is the longest that the job has recorded."""
        return max(self.rebuild_limit_s * (1 + world_size / _PER_DOUBLING), 4 * longest_s)


def policy_table() -> str:
    """The table of docs/policy.md, in Markdown."""
    rows = [_HEAD, "|---|---|---|"]
    for name, info in Policy.model_fields.items():
        value = info.default
        if isinstance(value, tuple):
            shown = ", ".join(f"`{v}`" for v in value)
        else:
            shown = f"`{value}`" if isinstance(value, (bool, str)) else f"`{value:g}`"
        rows.append(f"| `{name}` | {shown} | {info.description} |")
    return "\n".join(rows) + "\n"


def rewrite_table(page: str) -> str:
    """The page with its table as it is now."""
    before, _, rest = page.partition(_HEAD)
    lines = rest.splitlines(keepends=True)[1:]
    while lines and lines[0].startswith("|"):
        del lines[0]
    return before + policy_table() + "".join(lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(rewrite_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    if len(sys.argv) == 1:
        print(policy_table(), end="")
