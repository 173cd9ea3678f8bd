"""The phases a fault can be aimed at, and when each of them comes by."""

from __future__ import annotations

STEP_PHASES = ("step", "data", "forward", "backward", "optimizer")
"""Entered once in every step ("step" is its first instant, also in a script that marks no phases)."""

OCCASIONAL_PHASES = ("save", "eval")
"""Entered in some steps only: a fault aimed at step s fires at the first entry at or after s."""

RECOVERY_PHASES = ("recovery", "init", "load", "first_step")
"""Entered while a generation starts: a fault aimed at step s fires in the first recovery from a fault at or after s."""

PHASES = STEP_PHASES + OCCASIONAL_PHASES + RECOVERY_PHASES

DEFAULT_PHASES = ("forward", "backward", "optimizer")
"""What a schedule draws from unless told otherwise."""
