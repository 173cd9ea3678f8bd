"""Checkpoints: what a state is, snapshots that never stall, the keeper that writes them, and the load that
never lies.

Importing this package costs nothing: each name loads its module on first use. The keeper process imports only
the modules that know no torch, so that it starts in a tenth of a second and stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridethrough.checkpoint.checkpointer import Checkpointer as Checkpointer
    from ridethrough.checkpoint.checkpointer import abandon as abandon
    from ridethrough.checkpoint.errors import CheckpointError as CheckpointError
    from ridethrough.checkpoint.errors import CheckpointTimeout as CheckpointTimeout
    from ridethrough.checkpoint.errors import NoUsableCheckpoint as NoUsableCheckpoint
    from ridethrough.checkpoint.errors import StateMismatch as StateMismatch
    from ridethrough.checkpoint.errors import StorageFull as StorageFull
    from ridethrough.checkpoint.figures import LoadReport as LoadReport
    from ridethrough.checkpoint.recording import set_recorder as set_recorder
    from ridethrough.checkpoint.state import State as State
    from ridethrough.checkpoint.ticket import Ticket as Ticket

_HOME = {
    "Checkpointer": "checkpointer",
    "LoadReport": "figures",
    "abandon": "checkpointer",
    "set_recorder": "recording",
    "CheckpointError": "errors",
    "CheckpointTimeout": "errors",
    "NoUsableCheckpoint": "errors",
    "StateMismatch": "errors",
    "StorageFull": "errors",
    "State": "state",
    "Ticket": "ticket",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
