"""Claiming a place on a root's time line, and choosing what to load: alike on all ranks.

Rank 0 reads the root, proposes the newest believable attempt, every rank reads and verifies its part, and any
rank's failure makes all step down to the next older one. Then, before the training function goes on,
`gen-<epoch>.<generation>.json` is created exclusively with the step that was resumed from: later readers
reject commits of older generations above that step.
"""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ridethrough.checkpoint import fileops, layout
from ridethrough.checkpoint.apply import Filling
from ridethrough.checkpoint.errors import (
    HALF_WRITTEN,
    CheckpointError,
    CheckpointTimeout,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    StaleGeneration,
    StateMismatch,
)
from ridethrough.checkpoint.peers import Peers
from ridethrough.checkpoint.restore import Index

_T = TypeVar("_T")
_JOB = ("RIDETHROUGH_JOB", "RIDETHROUGH_RUN_DIR", "TORCHELASTIC_RUN_ID", "RIDETHROUGH_EPOCH", "RIDETHROUGH_AGENT")
_plain_script = secrets.token_hex(8)


def job_identity() -> str:
    """Which launch this process belongs to: alike for all its generations, different for the next launch."""
    parts = [os.environ.get(name, "") for name in _JOB]
    return "|".join(parts) if "RIDETHROUGH_GENERATION" in os.environ else _plain_script


def claim(root: Path, resumed_from: int | None, base: str | None, world_size: int) -> layout.Lineage:
    """Announce this generation in `root` (rank 0 only) and return its lineage.

    Under a launcher the job's generation number orders the records; the root has its own epochs, so that a
    new job on an old root comes after everything that is there. Raises StaleGeneration when a newer
    generation of the same job has announced itself.
    """
    job = job_identity()
    launched = "RIDETHROUGH_GENERATION" in os.environ
    generation = int(os.environ.get("RIDETHROUGH_GENERATION", "0"))
    for _ in range(1000):
        records = layout.read_generations(root)
        mine = [key for key, known in records.items() if known.get("job") == job]
        newest = max(records, default=(-1, -1))
        if mine and launched:
            last = max(mine)
            if last != newest:
                raise StaleGeneration(
                    f"{root}: generation {newest[0]}.{newest[1]} of another job has started from here"
                )
            if generation > last[1]:
                epoch, number = last[0], generation
            elif generation < last[1]:
                raise StaleGeneration(
                    f"{root}: generation {last[0]}.{last[1]} of this job has already started from here"
                )
            else:
                epoch, number = newest[0] + 1, generation
        else:
            epoch = newest[0] + 1
            epoch = max(epoch, int(os.environ.get("RIDETHROUGH_EPOCH", "0")))
            number = generation
        lineage = layout.Lineage(epoch, number, secrets.token_hex(4))
        mine_now = record(lineage, resumed_from, base, world_size, time.time())
        try:
            fileops.write_small(root / lineage.record_name(), layout.seal(mine_now))
            fileops.sync_folder(root)
            return lineage
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"{root / lineage.record_name()}: {error.strerror or error}; the root must be writable"
            ) from error
    raise CheckpointError(f"{root}: no free generation number")


def record(
    lineage: layout.Lineage, resumed_from: int | None, base: str | None, world_size: int, created: float
) -> dict[str, Any]:
    """What `gen-<epoch>.<generation>.json` says."""
    return {
        "schema": layout.SCHEMA,
        "epoch": lineage.epoch,
        "generation": lineage.generation,
        "resumed_from": resumed_from,
        "base": base,
        "nonce": lineage.nonce,
        "job": job_identity(),
        "world_size": world_size,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
    }


def bounded(call: Callable[[], _T], limit_s: float, what: str) -> _T:
    """The call's result, or CheckpointTimeout after `limit_s`: a file system that hangs can't be interrupted. The
    thread (`rt-storage`) stays behind until it answers."""
    results: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="rt-storage", daemon=True).start()
    if not done.wait(limit_s):
        raise CheckpointTimeout(f"{what}: storage did not answer within {limit_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


Prepare = Callable[[Index], Filling]
_FAILURES = (DamagedCheckpoint, StateMismatch, OSError)


def choose_and_load(
    root: Path,
    peers: Peers,
    prepare: Prepare,
    *,
    allow_fresh: bool,
    careful: bool,
    older_than: int | None = None,
    storage_timeout_s: float = 60.0,
) -> tuple[layout.Attempt | None, Filling | None, list[tuple[str, str]]]:
    """(attempt loaded or None for a fresh start, how this rank was filled, rejected ones with reasons).

    DamagedCheckpoint from any rank makes all go one older. `careful`: an attempt is read twice, and the state is
    written into only when every rank has found its share whole; so whatever comes after a rejected one (a fresh
    start, an older one without some keys) finds the state as it was. States from `older_than` on come last: they have
    failed. Raises StateMismatch (all ranks), NoUsableCheckpoint, CheckpointError,
    CheckpointTimeout when the root's small records can't be read within storage_timeout_s."""
    rejected: list[tuple[str, str]] = []
    candidates: list[layout.Attempt] = []
    if peers.rank == 0:
        attempts = bounded(lambda: _scan(root), storage_timeout_s, f"{root}: listing checkpoints")
        candidates = [a for a in attempts if a.state == "committed"]
        if older_than is not None:
            candidates.sort(key=lambda a: a.step >= older_than)
        rejected = [(str(a.path), a.reason) for a in attempts if a.state != "committed"]
        had_commit = any(a.state in ("committed", "damaged") for a in attempts)
    while True:
        proposal: dict[str, Any] | None = None
        if peers.rank == 0:
            ask = functools.partial(_propose, candidates, rejected)
            proposal = bounded(ask, storage_timeout_s, f"{root}: reading records")
        proposal = peers.from_rank0("load", proposal)
        assert proposal is not None
        if proposal["name"] is None:
            rejected = [(str(p), str(r)) for p, r in proposal["rejected"]]
            if peers.rank == 0:
                proposal["had_commit"] = had_commit
            had = peers.from_rank0("had_commit", proposal.get("had_commit"))
            if had and not allow_fresh:
                lines = "".join(f"\n  {path}: {reason}" for path, reason in rejected)
                raise NoUsableCheckpoint(
                    f"{root}: 0 of {len(rejected)} checkpoints usable; nothing was deleted. "
                    f"Repair one, choose another root, or start over with allow_fresh=True:{lines}"
                )
            return None, None, rejected
        folder = root / proposal["name"]
        attempt = layout.Attempt(proposal["step"], proposal["attempt"], folder, "committed")
        ready = functools.partial(_prepare, attempt, prepare, careful)
        filling, failure = peers.together("prepared", ready, _FAILURES)
        if failure is not None and failure.kind == StateMismatch.__name__:
            raise StateMismatch(failure.text)
        if filling is not None and failure is None:
            _, failure = peers.together("loaded", filling.fill, _FAILURES)
            if failure is None:
                rejected = [(str(p), str(r)) for p, r in proposal["rejected"]]
                return attempt, filling, rejected
            if failure.kind == StateMismatch.__name__:  # in a value that only reading shows
                raise StateMismatch(f"{failure.text}. {HALF_WRITTEN}")
            if careful:
                raise CheckpointError(f"{failure.text}. {HALF_WRITTEN}")
        assert failure is not None
        if filling is not None:
            filling.undo()
        if peers.rank == 0:
            rejected.append((str(folder), failure.text))
            _mark(folder, failure.text)


def _prepare(attempt: layout.Attempt, prepare: Prepare, careful: bool) -> Filling:
    attempt.commit = layout.read_commit(attempt.path)
    filling = prepare(Index(attempt.path, layout.read_manifests(attempt)))
    if careful:
        filling.verify()
    return filling


def _scan(root: Path) -> list[layout.Attempt]:
    fileops.reading("list", root)
    return layout.scan(root)


def _propose(candidates: list[layout.Attempt], rejected: list[tuple[str, str]]) -> dict[str, Any]:
    """The newest candidate whose small records are whole (rank 0; bad ones are named and skipped on the way)."""
    while candidates:
        attempt = candidates.pop(0)
        try:
            layout.read_manifests(attempt)
        except (DamagedCheckpoint, OSError) as error:
            rejected.append((str(attempt.path), str(error)))
            _mark(attempt.path, str(error))
            continue
        return {"name": attempt.path.name, "step": attempt.step, "attempt": attempt.attempt, "rejected": list(rejected)}
    return {"name": None, "rejected": list(rejected)}


def _mark(folder: Path, reason: str) -> None:
    """Leave a note in a damaged checkpoint; it is evidence and stays. Best effort: the root may be read-only."""
    try:
        fileops.write_small(folder / layout.REJECTED, layout.seal({"reason": reason, "found": time.time()}))
    except OSError:
        pass


def check_root(root: Path) -> None:
    """Make the root and prove that it can be written, so that a bad path is met before training."""
    try:
        fileops.reading("mkdir", root)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"probe")
    except OSError as error:
        reason = "it is a file, not a folder" if root.is_file() else error.strerror or error
        raise CheckpointError(f"checkpoint root {root} cannot be written: {reason}; choose another") from error
