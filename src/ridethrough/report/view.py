"""A run as the dashboard shows it: its status and its timeline, ready to send. Kept in the index."""

from __future__ import annotations

import json
import zlib
from typing import Any

from ridethrough.ledger.rundir import flat_config
from ridethrough.ledger.summary import RunLedger
from ridethrough.report.figures import marks, timeline
from ridethrough.report.headline import headline
from ridethrough.report.notes import read_notes
from ridethrough.report.status import status_of


def view_of(ledger: RunLedger, *, running: bool) -> dict[str, Any]:
    """`status` (as `ridethrough status --json`, with its headline), `timeline`, `marks`, `states_s`, `about`."""
    part, status = ledger.part, status_of(ledger, running=running)
    return {
        "status": {**status.as_json(), "headline": headline(status)},
        "timeline": timeline(part, bars=False),
        "marks": marks(part, ledger.incidents),
        "states_s": {state: ns / 1e9 / part.slots for state, ns in part.states_ns.items() if ns},
        "wall_s": part.wall_ns / 1e9,
        "about": about(ledger),
    }


def about(ledger: RunLedger) -> dict[str, str]:
    """Where a run came from, every setting of it, and what was noted of it: name -> text."""
    run = ledger.run
    config = {f"config {key}": str(value) for key, value in flat_config(run["config"]).items()}
    notes = {
        f"note of {note.created[:19]} by {note.author}": " ".join([note.text, *(f"[{tag}]" for tag in note.tags)])
        for note in read_notes(ledger.path)
    }
    return {
        "created": f"{run['created']} on {run['host']}",
        "command": " ".join(run["command"]),
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "fault schedule": str(run["schedule_hash"] or "none"),
        "config hash": str(run["config_hash"]),
        **notes,
        **config,
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
