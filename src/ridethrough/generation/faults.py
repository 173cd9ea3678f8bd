"""What a participant reports when something broke, and which of several reports is the root cause."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FaultClass = Literal[
    "exception",
    "hang",
    "collective",
    "sigkill",
    "sigsegv",
    "exit",
    "oom",
    "signal",
    "node_loss",
    "gpu",
    "corruption",
    "preemption",
]
DetectedBy = Literal["exception", "waitpid", "heartbeat", "collective", "lease", "user"]

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


class FaultReport(BaseModel):
    """One participant's account of a fault in one generation.

    `fault_ns` and `declared_ns` are nanoseconds of the reporting host's monotonic clock. `fatal` means that the policy
    inside the worker holds the fault for one that a restart cannot mend. `killed_by_us` marks the death of a process
    that the agent ended itself: it never is a root cause.
    """

    model_config = ConfigDict(frozen=True)

    generation: int
    worker: str
    rank: int | None = None
    node: str = ""
    pid: int = 0
    fault_class: FaultClass
    detected_by: DetectedBy
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
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """What makes two faults "the same again": class, and for exceptions type and place."""
        return f"{self.fault_class}:{self.cause.splitlines()[0] if self.cause else ''}"


def root_cause(reports: list[FaultReport]) -> FaultReport:
    """The report that explains the others (rule: died > hang > own exception > cut collective; then the earliest)."""
    if not reports:
        raise ValueError("an incident has at least one report")
    return min(reports, key=lambda r: (r.killed_by_us, _SEVERITY[r.fault_class], r.fault_ns or r.declared_ns))
