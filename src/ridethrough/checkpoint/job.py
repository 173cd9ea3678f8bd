"""One attempt from staged to committed, on the keeper's job thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridethrough.checkpoint import backlog, fileops, layout, persist, retention
from ridethrough.checkpoint.errors import CheckpointError, DamagedCheckpoint, StaleGeneration

if TYPE_CHECKING:
    from ridethrough.checkpoint.keeping import Keeping

WRITER_THREADS = max(1, min(4, os.cpu_count() or 1))


class Job:
    def __init__(self, group: backlog.Group, snapshot: backlog.Snapshot, keeper: Keeping) -> None:
        self.group, self.snapshot, self.keeper = group, snapshot, keeper
        self.started = time.monotonic()
        options = snapshot.options
        self.target = persist.Target(
            Path(group.key[0]),
            layout.Lineage(options["epoch"], options["generation"], options["nonce"]),
            snapshot.step,
            snapshot.attempt,
            group.world_size,
            options.get("commit_timeout_s", 600.0),
            options.get("metadata_by_torch", False),
        )

    def gone(self) -> str | None:
        return self.snapshot.give_up


def run_job(job: Job) -> None:
    """Write, commit (or wait for the leader's commit), prune, and tell the workers. Never raises."""
    try:
        if job.group.leads:
            if job.snapshot.options.get("claim"):
                persist.announce(job.target, job.snapshot.options["claim"])
            persist.check_fence(job.target.root, job.target.lineage)
        fileops.make_folder(job.target.folder)
        committed = _already_committed(job.target)
        bytes_written = 0 if committed else _write(job)
        finish = persist.commit if job.group.leads else _follow
        record = committed or finish(job.target, job.gone)
    except (OSError, ValueError, CheckpointError) as error:
        _failed(job, error)
        return
    seconds = time.monotonic() - job.started
    deleted: list[str] = []
    trouble = ""
    if job.group.leads:
        options = job.snapshot.options
        try:
            deleted = retention.apply(
                job.target.root, job.target.lineage, options.get("keep", 3), options.get("keep_every")
            )
        except (OSError, DamagedCheckpoint) as error:
            trouble = str(error)  # the commit stands; the next one prunes again
    event = {
        "ev": "committed",
        "path": str(job.target.folder),
        "bytes": record["bytes"],
        "written": bytes_written,
        "seconds": round(seconds, 6),
        "grace_s": job.keeper.grace_s,
        "deleted": deleted,
        "trouble": trouble,
        "unsupported": fileops.unsupported_seen(),
    }
    _finish(job, event)


def _already_committed(target: persist.Target) -> dict[str, Any] | None:
    """A keeper that was replaced just after its commit is asked again; the commit stands."""
    try:
        return layout.read_commit(target.folder)
    except (OSError, DamagedCheckpoint):
        return None


def _write(job: Job) -> int:
    parts = [
        persist.RankPart(rank, kept.buffers(), kept.entries, kept.layout, kept.finite)
        for rank, kept in sorted((rank, staged.payload) for rank, staged in job.snapshot.parts.items())
    ]
    stop = lambda: job.snapshot.give_up is not None  # noqa: E731
    workers = min(len(parts), WRITER_THREADS)
    threads = max(1, WRITER_THREADS // workers)
    if workers == 1:
        return sum(persist.write_part(job.target, part, threads, stop) for part in parts)
    with ThreadPoolExecutor(workers, thread_name_prefix="rt-part") as pool:
        return sum(pool.map(lambda part: persist.write_part(job.target, part, threads, stop), parts))


def _follow(target: persist.Target, gone: Callable[[], str | None]) -> dict[str, Any]:
    """Wait until rank 0's keeper has committed, or has given up."""
    deadline = time.monotonic() + target.commit_timeout_s
    pause = 0.005
    while True:
        record = _already_committed(target)
        if record is not None:
            return record
        reason = gone() or persist.given_up_by_a_peer(target)
        if reason is None and not target.folder.exists():
            reason = "rank 0's keeper gave it up"
        if reason:
            raise persist.SaveGivenUp(reason)
        if time.monotonic() > deadline:
            raise TimeoutError(0, f"no COMMIT in {target.commit_timeout_s:g} s", str(target.folder))
        time.sleep(pause)
        pause = min(0.1, pause * 2)


def _failed(job: Job, error: BaseException) -> None:
    ranks = sorted(job.snapshot.parts)
    on_purpose = isinstance(error, (StaleGeneration, InterruptedError)) or (job.snapshot.give_up is not None)
    if not job.group.alone:
        persist.say_failed(job.target, ranks[0] if ranks else 0, str(error))
    persist.clean_up(job.target, ranks, whole=job.group.leads)
    if on_purpose:
        _finish(job, {"ev": "superseded", "reason": job.snapshot.give_up or str(error)})
        return
    number = error.errno if isinstance(error, OSError) else None
    path = getattr(error, "filename", None) or str(job.target.folder)
    event = {
        "ev": "failed",
        "error": (error.strerror if isinstance(error, OSError) and error.strerror else str(error)),
        "errno": number,
        "path": str(path),
        "rank": _rank_of(str(path), ranks),
    }
    _finish(job, event)


def _rank_of(path: str, ranks: list[int]) -> int | None:
    name = os.path.basename(path)
    for rank in ranks:
        if name.startswith((f"__{rank}_", f"rank-{rank}.")):
            return rank
    return None


def _finish(job: Job, event: dict[str, Any]) -> None:
    keeper = job.keeper
    with keeper.wake:
        job.group.finish(job.snapshot)
        keeper.release(job.group, job.snapshot, event)
        keeper.wake.notify_all()
    keeper.recorder.emit(
        "save",
        step=job.snapshot.step,
        attempt=job.snapshot.attempt,
        event=event["ev"],
        bytes=event.get("bytes", 0),
        seconds=round(time.monotonic() - job.started, 6),
        error=event.get("error", ""),
    )
