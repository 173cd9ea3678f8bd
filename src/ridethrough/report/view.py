"""A run as the dashboard shows it: its status and its timeline, ready to send. Kept in the index."""

from __future__ import annotations

import json
import zlib
from typing import Any

from ridethrough.ledger.summary import RunLedger
from ridethrough.report.figures import marks, timeline
from ridethrough.report.status import status_of


def view_of(ledger: RunLedger, *, running: bool) -> dict[str, Any]:
    """`status` (as `ridethrough status --json`), `timeline`, `marks`, `states_s`."""
    part = ledger.part
    return {
        "status": status_of(ledger, running=running).as_json(),
        "timeline": timeline(part, bars=False),
        "marks": marks(part, ledger.incidents),
        "states_s": {state: ns / 1e9 / part.slots for state, ns in part.states_ns.items() if ns},
        "wall_s": part.wall_ns / 1e9,
    }


def packed(view: dict[str, Any]) -> bytes:
    """Compressed JSON. NaN and infinity, which JSON lacks, become null."""
    return zlib.compress(json.dumps(_finite(view), separators=(",", ":")).encode(), 6)


def unpacked(data: bytes) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(data)))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
