"""What a participant reports when something broke, and which of several reports is the root cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.exit_codes import REPLACE_ME
from ridethrough.ledger.schema import Detector, FaultClass

# A dead process explains its peers' errors, a cut collective explains nothing: the lower, the closer to the root.
_SEVERITY: dict[str, int] = {
    "node_loss": 0,
    "sigkill": 1,
    "sigsegv": 1,
    "exit": 1,
    "signal": 1,
    "oom": 1,
    "gpu": 2,
    "corruption": 2,
    "hang": 3,
    "exception": 4,
    "preemption": 5,
    "collective": 6,
}

# How a script that dies of a peer's death says so in its last line.
_CUT_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "DistNetworkError",
    "DistBackendError",
    "DistStoreError",
    "gloo",
    "NCCL",
)


class FaultReport(BaseModel):
    """One participant's account of a fault in one generation.

    `fault_ns` and `declared_ns` are nanoseconds of the reporting host's monotonic clock. `fatal` means that the policy
    inside the worker holds the fault for one that a restart cannot mend. `killed_by_us` marks the death of a process
    that the agent ended itself: it never is a root cause. `resumed_at` is the step of the state that the generation
    began from, as far as the reporter knows.
    """

    model_config = ConfigDict(frozen=True)

    generation: int
    worker: str
    rank: int | None = None
    node: str = ""
    pid: int = 0
    fault_class: FaultClass
    detected_by: Detector
    phase: str = ""
    step: int | None = None
    cause: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    declared_ns: int = 0
    fault_ns: int | None = None
    fatal: Literal["", "before_first_step", "policy"] = ""
    killed_by_us: bool = False
    resumed_at: int | None = None
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def first_line(self) -> str:
        return self.cause.splitlines()[0] if self.cause else self.fault_class

    @property
    def exception(self) -> str:
        """The exception's type name, if the cause begins with one ("ValueError: lr=-1 (train.py:12)")."""
        name = self.first_line.partition(":")[0]
        return name if self.fault_class == "exception" and name.replace(".", "_").isidentifier() else ""

    @property
    def fingerprint(self) -> str:
        """What makes two faults "the same again": class, and type and place of what was raised. A hang's cause tells
        how long it lasted, so there the phase counts."""
        return f"{self.fault_class}:{self.phase if self.fault_class == 'hang' else self.first_line}"

    @property
    def is_consequence(self) -> bool:
        """It says that a peer was gone, not what this process did wrong."""
        if self.fault_class == "collective":
            return True
        return self.fault_class == "exit" and any(text in self.first_line for text in _CUT_TEXTS)

    @property
    def is_ours(self) -> bool:
        """The process was ended by its agent, or asked to be replaced, because of something before."""
        return self.killed_by_us or self.exit_code == REPLACE_ME


def root_cause(reports: Sequence[FaultReport]) -> FaultReport:
    """The report that explains the others: died > hang > own exception > cut collective.

    Among equals the one that came first; hosts' clocks do not compare, so `fault_ns` only orders those of its node.
    Raises ValueError if there is none.
    """
    if not reports:
        raise ValueError("an incident has at least one report")

    def weight(report: FaultReport) -> tuple[bool, bool, int]:
        return report.is_ours, report.is_consequence, _SEVERITY[report.fault_class]

    first = min(reports, key=weight)
    equals = [r for r in reports if weight(r) == weight(first) and r.node == first.node]
    return min(equals, key=lambda r: r.fault_ns or r.declared_ns)
