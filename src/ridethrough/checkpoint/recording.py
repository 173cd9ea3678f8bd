"""Where checkpointers write their ledger events, unless they are given a recorder of their own.

Imports nothing, so that a process that saves nothing does not load the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Emit = Callable[..., Any]
emit: Emit | None = None


def set_recorder(function: Emit | None) -> None:
    """Events of checkpointers without a recorder go to `function(kind, **fields)` from here on; None: nowhere. Called
    by the restart room, main thread."""
    global emit
    emit = function
