"""The last thing that a launch prints: how it ended, and at the very end the root cause."""

from __future__ import annotations

import sys

from ridethrough.generation import messages as m
from ridethrough.ledger.rundir import RunDir


def last_words(incident: m.IncidentDecided | None, done: m.JobDone) -> None:
    """Nothing for success. Secondary errors in one line each, then the root with its traceback."""
    if done.code == 0:
        return
    out = [f"ridethrough: ended with code {done.code}: {done.reason}"]
    if incident is not None and incident.rung == "give_up":
        root = incident.root
        out += [f"  secondary: rank {r.rank}, {r.fault_class}: {_first_line(r.cause)}" for r in incident.secondary]
        where = f"rank {root.rank} on {root.node}, phase {root.phase or '?'}, step {root.step}"
        out += [f"root cause: {where}: {root.cause}"]
        if root.traceback:
            out += [root.traceback.rstrip()]
    print("\n".join(out), file=sys.stderr, flush=True)


def write_result(run: RunDir, done: m.JobDone) -> None:
    """Into run.json. A disk that is full by now does not change how the job ended."""
    try:
        run.finish(done.code, done.reason)
    except OSError as error:
        said = f"the result is not in {run.path / 'run.json'}, which cannot be written: {error.strerror}"
        print(f"ridethrough: {said}", file=sys.stderr, flush=True)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
