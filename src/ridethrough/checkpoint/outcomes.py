"""What became of a checkpointer's saves: counters, the states of their tickets, and what the next call has to raise."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

from ridethrough.checkpoint.errors import CheckpointError, StorageFull
from ridethrough.checkpoint.figures import Figures
from ridethrough.checkpoint.ticket import COMMITTED, FAILED, STAGED, SUPERSEDED, Ticket


class Outcomes:
    """`report(kind, **fields)` writes to the ledger. `speaks`: this rank warns for its node. Thread-safe."""

    def __init__(self, figures: Figures, on_error: Literal["raise", "warn"], report: Callable[..., None]) -> None:
        self.figures, self.on_error, self.report = figures, on_error, report
        self.speaks = False
        self.closed = False
        self._errors: list[CheckpointError] = []
        self._grace_checked = False
        self._lock = threading.Lock()

    def event(self, ticket: Ticket, event: dict[str, Any]) -> None:
        """A snapshot has come further. Called on the copy thread, or on the keeper's reader thread."""
        kind, figures = event["ev"], self.figures
        if ticket.in_memory and kind != "failed":
            ticket.advance(STAGED if kind == "held" else SUPERSEDED)
            figures.held += kind == "held"
            figures.not_held += kind != "held"
            return
        with self._lock:
            if kind == "staged":
                figures.staged += 1
                ticket.advance(STAGED)
            elif kind == "committed":
                figures.committed += 1
                figures.bytes_committed += event["bytes"]
                figures.write_s += event["seconds"]
                figures.last_committed_step = max(figures.last_committed_step, ticket.step)
                figures.last_committed_at = time.monotonic()
                self._check_grace(event["seconds"], event["grace_s"])
                ticket.advance(COMMITTED, path=event["path"], seconds=event["seconds"], nbytes=event["bytes"])
            elif kind == "superseded":
                figures.superseded += 1
                figures.skipped += bool(event.get("skipped"))
                if ticket.durable and not self.closed:
                    error = f"durable save of step {ticket.step} was dropped: {event.get('reason')}"
                    self._errors.append(CheckpointError(error))
                    ticket.advance(FAILED, error=error)
                else:
                    ticket.advance(SUPERSEDED)
            else:
                figures.failed += 1
                rank = event.get("rank")
                who = f"rank {rank}" if rank is not None else "the keeper"
                error = f"save of step {ticket.step} failed on {who}: {event['path']}: {event['error']}"
                full = event.get("errno") in (errno.ENOSPC, errno.EDQUOT)
                self._errors.append(StorageFull(error) if full else CheckpointError(error))
                ticket.advance(FAILED, error=error)
        self.report(
            "save",
            step=ticket.step,
            event=kind,
            bytes=event.get("bytes", 0),
            seconds=event.get("seconds", 0.0),
            path=event.get("path"),
            error=event.get("error"),
        )

    def _check_grace(self, write_s: float, grace_s: float) -> None:
        """Rule 27: whether the newest state in memory can be made durable when the job is told to stop."""
        if write_s > grace_s and self.speaks and not self._grace_checked:
            self._grace_checked = True
            warnings.warn(
                f"a checkpoint took {write_s:.3g} s to write, and a keeper that is told to stop has {grace_s:.3g} s: "
                "what is only in memory then may be lost; give it longer (--stop-grace), or faster storage",
                stacklevel=2,
            )

    def check(self) -> None:
        """Raise CheckpointError for saves that have failed since the last time, or warn of them. Training thread."""
        with self._lock:
            errors, self._errors = self._errors, []
        if not errors:
            return
        text = "; ".join(map(str, errors))
        if self.on_error == "raise":
            raise type(errors[0])(text)
        warnings.warn(text, stacklevel=4)
