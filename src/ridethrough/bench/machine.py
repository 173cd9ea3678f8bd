"""The machine and versions beside measured figures, without paths: a result is published, a bug report is not."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from ridethrough.report.environment import environment


def measured_on(folder: Path = Path()) -> dict[str, dict[str, Any]]:
    """`environment(folder)` without where Python lies on this machine."""
    found = environment(folder)
    found["machine"].pop("python_executable", None)
    return found


def now() -> str:
    """The time of day, UTC, for a result."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
