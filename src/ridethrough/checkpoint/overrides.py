"""RIDETHROUGH_CHECKPOINTER="mode=sync,every=5,memory=off": how a script saves, to measure it without touching it."""

from __future__ import annotations

import os
from typing import Any

from ridethrough.checkpoint.errors import CheckpointError

VARIABLE = "RIDETHROUGH_CHECKPOINTER"
_KNOWN = ("mode", "every", "memory")


def overridden(given: dict[str, Any]) -> dict[str, Any]:
    """`given` with what the variable says instead; `every=0` is None. Raises CheckpointError on what it can't use."""
    found = dict(given)
    for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = word.partition("=")
        if name not in _KNOWN or not value or (name == "every" and not value.isdigit()):
            raise CheckpointError(f"{VARIABLE}: {word!r}: use mode=sync, every=5 or memory=off (every=0: no saves)")
        found[name] = (int(value) or None) if value.isdigit() else value
    return found
