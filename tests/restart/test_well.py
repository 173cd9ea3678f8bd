"""Which health checks take a process out, and which are only reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridethrough.restart.well import Wellness


def look(run_dir: Path, check: Any) -> tuple[str, dict[str, str]]:
    """Why the process is to be replaced, and the status of each check as it was recorded."""
    recorded: dict[str, str] = {}

    def record(kind: str, **fields: Any) -> None:
        assert kind == "health"
        recorded[fields["check"]] = fields["status"]

    return Wellness(run_dir, check).look(record), recorded


def test_a_users_own_check_takes_the_process_out(tmp_path: Path) -> None:
    why, recorded = look(tmp_path, lambda: "the licence server is gone")
    assert why == "check user failed: the licence server is gone"
    assert recorded["user"] == "FAIL" and recorded["disk"] == "PASS"


def test_a_disk_that_is_gone_is_reported_and_takes_nobody_out(tmp_path: Path) -> None:
    why, recorded = look(tmp_path / "gone", lambda: True)
    assert why == ""
    assert recorded["user"] == "PASS" and recorded["disk"] == "FAIL"
