"""Which exceptions end a generation, which end the job, and which only say that a peer is gone."""

from __future__ import annotations

import traceback
from typing import Any, Literal

from ridethrough.checkpoint.errors import DamagedCheckpoint, NoUsableCheckpoint
from ridethrough.ledger.schema import FaultClass

_MAX_TRACEBACK = 16_000
_MAX_CAUSE = 2000  # characters


class Fatal(Exception):
    """Raise it in the training function to end the job: no restart will be tried (exit code 83)."""


class LeaveGeneration(BaseException):
    """Unwinds the training function because the generation has ended. Do not catch it; `finally` blocks may run for
    some tenths of a second, then the process is killed and replaced. `interrupted`: raised in the middle of something,
    not at a safe point."""

    def __init__(self, why: str, *, interrupted: bool = False) -> None:
        super().__init__(why)
        self.interrupted = interrupted


# What torch.distributed raises when a peer or a socket is gone; gloo only raises RuntimeError, known by its text.
_CUT = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Socket is not connected",
    "failed to recv",
    "failed to send",
    "NCCL",
    "ProcessGroup",
    "process group has been aborted",
    "wait timeout",
)
_NEVER_MEND = (KeyboardInterrupt, SystemExit, ImportError, SyntaxError, Fatal)


def is_cut_collective(error: BaseException) -> bool:
    """Whether the error says that communication with a peer broke, rather than that this rank did something wrong."""
    import torch.distributed as dist

    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CUT)


def classify(error: BaseException) -> FaultClass:
    """The ledger's word for it."""
    if isinstance(error, (DamagedCheckpoint, NoUsableCheckpoint)):
        return "corruption"
    if is_cut_collective(error):
        return "collective"
    if isinstance(error, RuntimeError) and ("CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"):
        return "gpu"
    return "exception"


def fatality(error: BaseException, *, first: bool) -> Literal["", "before_first_step", "policy"]:
    """`first`: no step was ever finished in this job's first generation, so that the script itself is to blame."""
    if isinstance(error, _NEVER_MEND):
        return "policy"
    if first and not is_cut_collective(error):
        return "before_first_step"
    return ""


def describe(error: BaseException) -> dict[str, Any]:
    """`cause` in one line with the place of the innermost frame, and the whole traceback (its end, if it is long)."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    first_line = (str(error).splitlines() or [""])[0][:_MAX_CAUSE]  # it travels with every plan from then on
    return {"cause": f"{type(error).__name__}: {first_line}{place}", "traceback": text[-_MAX_TRACEBACK:]}
