"""What `Checkpointer.load` does: memory first, then storage; then this generation's place on the root's time line.

A recovery from memory touches no storage at all: the record of the new generation is written by rank 0's keeper, before
the first commit of that generation.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridethrough.checkpoint import layout, timeline
from ridethrough.checkpoint.apply import Filling
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.figures import LoadReport
from ridethrough.checkpoint.held import Key
from ridethrough.checkpoint.layout import Lineage
from ridethrough.checkpoint.meeting import Meeting
from ridethrough.checkpoint.recall import Recalled, recall
from ridethrough.checkpoint.restore import Index
from ridethrough.checkpoint.state import State

if TYPE_CHECKING:
    from ridethrough.checkpoint.checkpointer import Checkpointer


_NOT_LOADED = (
    "the next load() takes the one with most steps, whichever run made it; call load() first, or use another root"
)


@dataclass
class Limits:
    """Times in seconds; see `Checkpointer`."""

    agree_timeout_s: float
    drain_timeout_s: float
    storage_timeout_s: float


@dataclass
class Loaded:
    """`claim` is the record that rank 0's keeper has still to write, or None."""

    step: int
    tier: str
    source: str | None
    lineage: Lineage
    claim: dict[str, Any] | None = None
    rejected: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, checkpointer: Checkpointer) -> LoadReport:
        """What the user gets."""
        about = (self.step, self.tier, self.source, self.rejected)
        return LoadReport(*about, checkpointer, self.missing, self.extra, self.notes)


def older_than() -> int | None:
    """The policy's word that states from this step on have failed twice."""
    text = os.environ.get("RIDETHROUGH_OLDER_THAN", "")
    return int(text) if text else None


def load(
    root: Path,
    state: State,
    meeting: Meeting,
    *,
    memory: bool,
    missing_ok: tuple[str, ...],
    extra_ok: tuple[str, ...],
    allow_fresh: bool,
    limits: Limits,
) -> Loaded:
    """Training thread, alike on all ranks. Raises what `Checkpointer.load` says."""
    found, passed_over = recall(root, state, meeting, older_than(), missing_ok, extra_ok) if memory else (None, [])
    if found is not None:
        loaded = _after_recall(found, meeting)
    else:
        loaded = _from_storage(root, state, meeting, missing_ok, extra_ok, allow_fresh, limits)
    loaded.rejected[:0] = passed_over
    settle(root, meeting, loaded.lineage, loaded.step, found.key if found is not None else None, limits)
    return loaded


def settle(root: Path, meeting: Meeting, lineage: Lineage, step: int | None, key: Key | None, limits: Limits) -> None:
    """Tell this node's keeper that `lineage` goes on from `step` (None: from no known one), which it holds as `key` or
    not at all. Whatever else it holds in memory is of a time line that is over. Alike on all ranks."""
    if not meeting.speaks:
        return
    message = {
        "op": "settle",
        "root": str(root),
        "key": list(key) if key is not None else None,
        "step": step,
        "lineage": lineage.attempt(0),
        "epoch": lineage.epoch,
        "generation": lineage.generation,
        "timeout_s": limits.drain_timeout_s,
    }
    meeting.client.ask(message, 5.0)


def _after_recall(found: Recalled, meeting: Meeting) -> Loaded:
    """The generation follows the one that made the version: on the same root epoch if it is a later one, as
    `timeline.claim` would have it."""
    generation = int(os.environ.get("RIDETHROUGH_GENERATION", "0"))
    epoch = found.key[0] if generation > found.key[1] else found.key[0] + 1
    nonce, created = meeting.peers.from_rank0("heir", [secrets.token_hex(4), time.time()])
    lineage = Lineage(epoch, generation, nonce)
    claim = timeline.record(lineage, found.step, None, meeting.peers.world_size, created)
    source = f"memory of generation {found.key[0]}.{found.key[1]}"
    return Loaded(found.step, found.tier, source, lineage, claim, [], found.missing, found.extra, found.notes)


def _from_storage(
    root: Path,
    state: State,
    meeting: Meeting,
    missing_ok: tuple[str, ...],
    extra_ok: tuple[str, ...],
    allow_fresh: bool,
    limits: Limits,
) -> Loaded:
    peers = meeting.peers
    drain = {"op": "drain", "root": str(root), "timeout_s": limits.drain_timeout_s}
    meeting.client.ask(drain, limits.drain_timeout_s + 5.0)
    peers.gather("drained", True)

    def prepare(index: Index) -> Filling:
        return Filling(state, index, peers.rank, peers.world_size, missing_ok, extra_ok)

    attempt, filling, rejected = timeline.choose_and_load(
        root,
        peers,
        prepare,
        allow_fresh=allow_fresh,
        careful=allow_fresh or bool(missing_ok),
        older_than=older_than(),
        storage_timeout_s=limits.storage_timeout_s,
    )
    step = attempt.step if attempt else 0
    lineage = claim(root, meeting, step, attempt.path.name if attempt else None, limits.storage_timeout_s)
    loaded = Loaded(step, "storage" if attempt else "fresh", str(attempt.path) if attempt else None, lineage)
    loaded.rejected = rejected
    if filling is not None:
        loaded.missing, loaded.extra, loaded.notes = filling.missing, filling.extra, filling.notes
    return loaded


def claim(root: Path, meeting: Meeting, resumed_from: int | None, base: str | None, limit_s: float) -> Lineage:
    """Announce this generation in the root, now. Rank 0 does it, all return it."""
    peers = meeting.peers
    value: Any = None
    if peers.rank == 0:
        try:
            made = timeline.bounded(
                lambda: timeline.claim(root, resumed_from, base, peers.world_size), limit_s, f"{root}: announcing"
            )
            value = [made.epoch, made.generation, made.nonce]
            if resumed_from is None and any(a.state == "committed" for a in layout.scan(root)):
                warnings.warn(
                    f"{root} has checkpoints and this run has loaded none of them: {_NOT_LOADED}", stacklevel=4
                )
        except CheckpointError as error:
            value = str(error)
    value = peers.from_rank0("lineage", value)
    if isinstance(value, str):
        raise CheckpointError(value)
    return layout.Lineage(*value)
