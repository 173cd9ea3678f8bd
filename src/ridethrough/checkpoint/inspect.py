"""Looking at a checkpoint root from outside: what is there, is it whole, what may go, and taking a state out
of it.

Plain functions that return data; `ridethrough ckpt` prints it. Only `export` needs torch, and imports it when
called.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ridethrough.checkpoint import layout, retention
from ridethrough.checkpoint.errors import CheckpointError, DamagedCheckpoint

EXPORT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
Progress = Callable[[int], None]


def list_attempts(root: Path) -> list[dict[str, Any]]:
    """One dict per attempt, newest first: step, attempt, path, state ("committed", "partial", "damaged"),
    bytes, world_size, created (ISO, None if unknown), reason. Damage of small records and sizes shows here;
    that of data in `verify`."""
    if not root.is_dir():
        raise CheckpointError(f"{root} is no folder; give the root that the Checkpointer was given")
    return [_describe(attempt) for attempt in layout.scan(root)]


def _describe(attempt: layout.Attempt) -> dict[str, Any]:
    commit = attempt.commit or {}
    state, reason = attempt.state, attempt.reason
    if state == "committed":
        try:
            layout.read_manifests(attempt)
        except (DamagedCheckpoint, OSError) as error:
            state, reason = "damaged", str(error)
    return {
        "step": attempt.step,
        "attempt": attempt.attempt,
        "path": str(attempt.path),
        "state": "damaged" if state == "rejected" else state,
        "bytes": commit.get("bytes", _size(attempt.path)),
        "world_size": commit.get("world_size"),
        "created": commit.get("created"),
        "reason": reason,
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def find(root: Path, step: int | None) -> layout.Attempt:
    """The newest committed attempt, or that of `step`; an attempt's own folder is taken as it is. Raises
    CheckpointError."""
    if layout.parse_attempt(root.name):
        attempts, step = [a for a in layout.scan(root.parent) if a.path.name == root.name], None
    else:
        list_attempts(root)
        attempts = layout.scan(root)
    for attempt in attempts:
        if attempt.state == "committed" and step in (None, attempt.step):
            return attempt
    raise CheckpointError(f"{root}: no committed checkpoint{'' if step is None else f' of step {step}'}; see `ckpt ls`")


@contextlib.contextmanager
def naming_a_whole_one(attempt: layout.Attempt) -> Iterator[None]:
    """Damage of `attempt` that is met inside is raised with the remedy: the newest other checkpoint of its root whose
    every byte is as it was written."""
    try:
        yield
    except DamagedCheckpoint as error:
        others = [a for a in layout.scan(attempt.path.parent) if a.state == "committed" and a.path != attempt.path]
        whole = next((a for a in others if not verify(a)), None)
        remedy = f"--step {whole.step} is whole: {whole.path}" if whole else "no other checkpoint here is whole"
        raise DamagedCheckpoint(f"{error}; {remedy}") from error


def committed(root: Path) -> list[layout.Attempt]:
    """Every attempt that has committed and was not rolled back, newest first, whole or not."""
    list_attempts(root)
    return [a for a in layout.scan(root) if a.state == "committed"]


def show(attempt: layout.Attempt) -> dict[str, Any]:
    """What one checkpoint holds: description, generation, and every key with dtype, shape, bytes and number
    of chunks."""
    keys: dict[str, dict[str, Any]] = {}
    for manifest in layout.read_manifests(attempt):
        for entry in manifest["entries"]:
            known = keys.setdefault(
                entry["k"],
                {"key": entry["k"], "dtype": entry.get("d"), "shape": entry.get("s"), "bytes": 0, "chunks": 0},
            )
            known["bytes"] += entry.get("n", 0)
            known["chunks"] += entry["f"] is not None
    commit = attempt.commit or {}
    return {
        **_describe(attempt),
        "epoch": commit.get("epoch"),
        "generation": commit.get("generation"),
        "version": commit.get("version"),
        "keys": list(keys.values()),
    }


def verify(attempt: layout.Attempt, progress: Progress | None = None) -> str:
    """Read every byte and compare it with its hash; "" when whole, else what is wrong. `progress` gets the
    bytes read, as they are."""
    try:
        for manifest in layout.read_manifests(attempt):
            for file in manifest["files"]:
                for size in _check_file(attempt.path / file["name"], file):
                    if progress is not None:
                        progress(size)
    except (DamagedCheckpoint, OSError) as error:
        return str(error)
    return ""


def data_bytes(attempt: layout.Attempt) -> int:
    """Bytes that `verify` will read."""
    return sum(f["bytes"] for m in layout.read_manifests(attempt) for f in m["files"])


def _check_file(path: Path, file: dict[str, Any]) -> Iterator[int]:
    with open(path, "rb") as stream:
        for number, expected in enumerate(file["hashes"]):
            data = stream.read(file["chunk_bytes"])
            if layout.digest(data) != expected:
                start = number * file["chunk_bytes"]
                raise DamagedCheckpoint(f"{path}: bytes {start}..{start + len(data)} differ from their committed hash")
            yield len(data)


def prune(
    root: Path, keep: int, keep_every: int | None, damaged: bool = False, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Delete (or with dry_run only list) what retention would, and all partial and damaged attempts if asked.

    Never the newest good one, whose every byte is verified first. For a root that no job is writing to.
    Raises CheckpointError.
    """
    newest = find(root, None)
    wrong = verify(newest)
    if wrong:
        raise CheckpointError(f"nothing deleted: the newest checkpoint is damaged ({wrong})")
    attempts = layout.scan(root)
    now = max(layout.read_generations(root), default=(0, 0))
    gone = retention.victims(attempts, layout.Lineage(*now), keep, keep_every)
    if damaged:
        listed = {a.path for a in gone}
        for attempt in attempts:
            if (
                attempt.path not in listed
                and attempt.path != newest.path
                and _describe(attempt)["state"] != "committed"
            ):
                gone.append(attempt)
    described = [_describe(attempt) for attempt in gone]
    if not dry_run:
        for attempt in gone:
            retention.remove(attempt)
    return described


def export(attempt: layout.Attempt, target: Path, only: str | None = None) -> dict[str, Any]:
    """Write the state into one file: `.safetensors` (tensors only), or `.pt`, `.pth`, `.bin` by `torch.save` (nested
    dict, with values).

    `only` keeps the keys below that name ("model"). Needs the memory of the exported state. Raises
    CheckpointError when `target` has another suffix, exists or cannot be written, when safetensors is asked for and not
    installed, or when a byte differs from its hash.
    """
    if target.suffix not in EXPORT_SUFFIXES:
        raise CheckpointError(f"{target}: the suffix says the format; it is one of {', '.join(EXPORT_SUFFIXES)}")
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another name")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{target.parent} is no folder that can be written; choose another")
    from ridethrough.checkpoint.export import write_export

    return write_export(attempt, target, only)
