"""ridethrough keeps PyTorch training jobs productive through faults.

The names a training script needs; each loads its room on first use, so that `import ridethrough` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ridethrough.version import __version__

if TYPE_CHECKING:
    from ridethrough.checkpoint import Checkpointer as Checkpointer
    from ridethrough.checkpoint import State as State
    from ridethrough.restart import Fatal as Fatal
    from ridethrough.restart import Run as Run
    from ridethrough.restart import heartbeat as heartbeat
    from ridethrough.restart import restartable as restartable
    from ridethrough.restart import run as run

_HOME = {
    "Checkpointer": "ridethrough.checkpoint",
    "State": "ridethrough.checkpoint",
    "Fatal": "ridethrough.restart",
    "Run": "ridethrough.restart",
    "heartbeat": "ridethrough.restart",
    "restartable": "ridethrough.restart",
    "run": "ridethrough.restart",
}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ridethrough' has no attribute {name!r}")
