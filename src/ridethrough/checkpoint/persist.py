"""Writing one attempt: a rank's files and manifest, and the commit that makes all ranks' files a checkpoint.

    each rank's keeper:  folder, data files, manifest          (each fsynced)
    rank 0's keeper:     waits for all manifests, .metadata, fences, COMMIT, fsync of the folder; then retention

Nothing is renamed and nothing is overwritten, so object-store mounts work, and a reader needs only COMMIT.
Several keepers meet through the shared file system alone. Runs on the keeper's job thread. Knows nothing of
torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.checkpoint import dcpindex, fileops, layout
from ridethrough.checkpoint.errors import CheckpointError, DamagedCheckpoint, StaleGeneration
from ridethrough.version import __version__


class SaveGivenUp(CheckpointError):
    """The save was dropped on purpose: superseded, abandoned, or fenced by a newer generation."""


@dataclass
class Target:
    """Where and as what an attempt is written. `world_size` ranks take part; times in seconds."""

    root: Path
    lineage: layout.Lineage
    step: int
    attempt: str
    world_size: int
    commit_timeout_s: float = 600.0
    metadata_by_torch: bool = False

    @property
    def folder(self) -> Path:
        return self.root / layout.attempt_folder(self.step, self.attempt)


@dataclass
class RankPart:
    """One rank's share: buffers in file order, and the entries that say what lies where in them."""

    rank: int
    buffers: list[memoryview]
    entries: list[dict[str, Any]]
    layout_hash: str = ""
    finite: bool = True


def write_part(target: Target, part: RankPart, threads: int, stop: Callable[[], bool]) -> int:
    """Write one rank's data files and its manifest; returns bytes written. Raises OSError naming the file."""
    files = []
    for index, buffer in enumerate(part.buffers):
        name = layout.data_file(part.rank, index)
        try:
            hashes = fileops.write_data(target.folder / name, buffer, threads, stop)
        except OSError as error:
            raise _explained(error, target.folder / name, len(buffer)) from error
        files.append({"name": name, "bytes": len(buffer), "chunk_bytes": fileops.CHUNK_BYTES, "hashes": hashes})
    manifest = layout.seal(
        {
            "schema": layout.SCHEMA,
            "rank": part.rank,
            "world_size": target.world_size,
            "step": target.step,
            "attempt": target.attempt,
            "layout": part.layout_hash,
            "finite": part.finite,
            "files": files,
            "entries": part.entries,
        }
    )
    path = target.folder / layout.manifest_file(part.rank)
    try:
        fileops.unlink(path)
        fileops.write_small(path, manifest)
        fileops.sync_folder(target.folder)
    except OSError as error:
        raise _explained(error, path, len(manifest)) from error
    return sum(len(b) for b in part.buffers) + len(manifest)


def _explained(error: OSError, path: Path, needed: int) -> OSError:
    if isinstance(error, InterruptedError):
        return error
    text = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = shutil.disk_usage(path.parent).free
            text += f": {needed} bytes needed, {free} free; free space or lower `keep`"
        except OSError:
            pass
    return OSError(error.errno or errno.EIO, text, str(path))


def commit(target: Target, gone: Callable[[], str | None]) -> dict[str, Any]:
    """Wait for every rank's manifest, then write `.metadata` and COMMIT. Returns the commit record.

    `gone` gives the reason why the save should be given up, or None. Raises SaveGivenUp, StaleGeneration,
    TimeoutError, OSError, ValueError; without COMMIT the attempt does not count.
    """
    manifests, items = _gather(target, gone)
    data = _metadata(target, manifests)
    fileops.unlink(target.folder / layout.METADATA)
    fileops.write_small(target.folder / layout.METADATA, data)
    record = {
        "schema": layout.SCHEMA,
        "version": __version__,
        "step": target.step,
        "attempt": target.attempt,
        "epoch": target.lineage.epoch,
        "generation": target.lineage.generation,
        "world_size": target.world_size,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bytes": sum(f["bytes"] for m in manifests for f in m["files"]) + len(data),
        "finite": all(m.get("finite", True) for m in manifests),
        "metadata": {"bytes": len(data), "hash": layout.digest(data)},
        "manifests": items,
    }
    fileops.sync_folder(target.folder)
    check_fence(target.root, target.lineage)
    reason = gone()
    if reason:
        raise SaveGivenUp(reason)
    fileops.write_small(target.folder / layout.COMMIT, layout.seal(record))
    fileops.sync_folder(target.folder)
    return record


def check_fence(root: Path, lineage: layout.Lineage) -> None:
    """Raise StaleGeneration when a newer generation has announced itself in this root."""
    newest = max(layout.read_generations(root), default=(-1, -1))
    if newest > (lineage.epoch, lineage.generation):
        raise StaleGeneration(
            f"{root}: generation {newest[0]}.{newest[1]} has started; "
            f"{lineage.epoch}.{lineage.generation} may not commit"
        )


def announce(target: Target, record: dict[str, Any]) -> None:
    """Write the generation's record, if that has not been done: a generation that was loaded from memory did not
    wait for storage. Raises StaleGeneration when the place is taken, OSError."""
    path = target.root / target.lineage.record_name()
    try:
        known = layout.unseal(path.read_bytes(), str(path))
    except FileNotFoundError:
        fileops.write_small(path, layout.seal(record))
        fileops.sync_folder(target.root)
        return
    if known.get("nonce") != record["nonce"]:
        raise StaleGeneration(f"{path}: another process has started this generation")


def _gather(target: Target, gone: Callable[[], str | None]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    manifests: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    deadline = time.monotonic() + target.commit_timeout_s
    pause = 0.002
    while len(manifests) < target.world_size:
        rank = len(manifests)
        path = target.folder / layout.manifest_file(rank)
        try:
            data = path.read_bytes()
            manifests.append(layout.unseal(data, str(path)))
            items.append({"rank": rank, "name": path.name, "bytes": len(data), "hash": layout.digest(data)})
            pause = 0.002
            continue
        except (FileNotFoundError, DamagedCheckpoint):
            pass  # not there yet, or being written
        reason = gone() or given_up_by_a_peer(target)
        if reason:
            raise SaveGivenUp(reason)
        if time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"rank {rank}'s part of step {target.step} did not appear in {target.commit_timeout_s:g} s",
                str(path),
            )
        time.sleep(pause)
        pause = min(0.1, pause * 2)
    return manifests, items


def given_up_marker(rank: int) -> str:
    return f"rank-{rank}.failed"


def given_up_by_a_peer(target: Target) -> str | None:
    try:
        names = os.listdir(target.folder)
    except OSError:
        return None
    for name in names:
        if name.endswith(".failed"):
            try:
                return (target.folder / name).read_text() or name
            except OSError:
                return name
    return None


def say_failed(target: Target, rank: int, reason: str) -> None:
    """Leave a note for the other nodes' keepers; best effort, they also have a limit."""
    try:
        (target.folder / given_up_marker(rank)).write_text(f"rank {rank}: {reason}")
    except OSError:
        pass


def clean_up(target: Target, ranks: list[int], whole: bool) -> None:
    """Remove the files of `ranks` of an attempt that will never be committed; `whole` removes all of it."""
    if (target.folder / layout.COMMIT).exists():
        return
    try:
        names = os.listdir(target.folder)
    except OSError:
        return
    for name in names:
        mine = any(name.startswith((f"__{r}_", f"rank-{r}.json")) for r in ranks)
        if whole or mine:
            try:
                fileops.unlink(target.folder / name)
            except OSError:
                pass
    try:
        fileops.remove_folder(target.folder)
    except OSError:
        pass


def _metadata(target: Target, manifests: list[dict[str, Any]]) -> bytes:
    if not target.metadata_by_torch:
        return dcpindex.build(manifests)
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough.checkpoint.dcpindex_torch", str(target.folder)],
        capture_output=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"{target.folder}: writing .metadata with torch failed: {done.stderr.decode()[-500:]}")
    return done.stdout
