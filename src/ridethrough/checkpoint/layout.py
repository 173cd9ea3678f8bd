"""Names and records in a checkpoint root, and which of them may be believed. Knows nothing of torch.

    <root>/gen-<epoch>.<generation>.json          one per generation: the step that it resumed from
    <root>/step-<n>.<attempt>/__<rank>_0.distcp   tensors of a rank, in DCP's own format
    <root>/step-<n>.<attempt>/__<rank>_1.distcp   small values of a rank
    <root>/step-<n>.<attempt>/rank-<rank>.json    manifest: entries, and hashes of the rank's files
    <root>/step-<n>.<attempt>/.metadata           DCP's index
    <root>/step-<n>.<attempt>/COMMIT              last; hashes of .metadata and of every manifest

Every record of ours is sealed: it carries the hash of its own bytes, so that a cut or flipped one is never
believed.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ridethrough.checkpoint.errors import DamagedCheckpoint

SCHEMA = 1
COMMIT = "COMMIT"
METADATA = ".metadata"
REJECTED = "REJECTED.json"
_ATTEMPT = re.compile(r"^step-(\d+)\.(.+)$")
_GENERATION = re.compile(r"^gen-(\d+)\.(\d+)\.json$")
_PREFIX, _MIDDLE, _END = b'{"body":', b',"seal":"', b'"}\n'
_SEAL_BYTES = 32


def digest(*pieces: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of the pieces one after the other, as 32 hex digits."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def seal(record: dict[str, Any]) -> bytes:
    """The bytes of a record's file: its JSON and the hash of exactly these bytes."""
    body = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return _PREFIX + body + _MIDDLE + digest(body).encode() + _END


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The record in `data`. Raises DamagedCheckpoint, which names `what`, if even one byte is not as sealed."""
    tail = len(_MIDDLE) + _SEAL_BYTES + len(_END)
    body = data[len(_PREFIX) : -tail]
    if len(data) < len(_PREFIX) + tail or data != _PREFIX + body + _MIDDLE + digest(body).encode() + _END:
        raise DamagedCheckpoint(f"{what}: damaged or cut ({len(data)} bytes)")
    record = json.loads(body)
    if not isinstance(record, dict):
        raise DamagedCheckpoint(f"{what}: not a record")
    return record


@dataclass(frozen=True, order=True)
class Lineage:
    """One generation on one root's time line. Ordered by (epoch, generation)."""

    epoch: int
    generation: int
    nonce: str = field(default="", compare=False)

    def attempt(self, number: int) -> str:
        """Name of the number-th save of a step; of the generation itself with 0."""
        return f"e{self.epoch}.g{self.generation}.{self.nonce}.{number}"

    def record_name(self) -> str:
        return f"gen-{self.epoch}.{self.generation}.json"


def attempt_folder(step: int, attempt: str) -> str:
    return f"step-{step}.{attempt}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    match = _ATTEMPT.match(name)
    return (int(match[1]), match[2]) if match else None


def attempts_begun(root: str) -> set[tuple[int, str]]:
    """Step and name of all attempts that have a folder; none if the root can't be read."""
    try:
        return {parsed for name in os.listdir(root) if (parsed := parse_attempt(name))}
    except OSError:
        return set()


def data_file(rank: int, index: int) -> str:
    return f"__{rank}_{index}.distcp"


def manifest_file(rank: int) -> str:
    return f"rank-{rank}.json"


@dataclass
class Attempt:
    """A `step-*` folder. state: "committed" | "partial" | "damaged" | "rejected"; reason says why not
    committed."""

    step: int
    attempt: str
    path: Path
    state: str
    reason: str = ""
    commit: dict[str, Any] | None = None

    @property
    def order(self) -> tuple[int, int, int, str]:
        commit = self.commit or {}
        return self.step, int(commit.get("epoch", -1)), int(commit.get("generation", -1)), self.attempt


def read_generations(root: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """All generation records of a root. A damaged one still counts as announced: it resumed from nobody knows
    where, so it fences nothing (`resumed_from` None)."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return found
    for name in names:
        match = _GENERATION.match(name)
        if match:
            try:
                record = unseal((root / name).read_bytes(), str(root / name))
            except (OSError, DamagedCheckpoint):
                record = {"resumed_from": None}
            found[int(match[1]), int(match[2])] = record
    return found


def read_commit(path: Path) -> dict[str, Any]:
    """The COMMIT of an attempt folder. Raises FileNotFoundError or DamagedCheckpoint."""
    return unseal((path / COMMIT).read_bytes(), str(path / COMMIT))


def scan(root: Path) -> list[Attempt]:
    """Every attempt under `root`, newest first, with what its COMMIT and the generation records say.

    Reads the small records only; hashes of the data are checked by who reads the data.
    """
    generations = read_generations(root)
    found: list[Attempt] = []
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return found
    for name in names:
        parsed = parse_attempt(name)
        if parsed is None:
            continue
        path = root / name
        attempt = Attempt(parsed[0], parsed[1], path, "committed")
        found.append(attempt)
        try:
            data = (path / COMMIT).read_bytes()
            if not data.endswith(_END):
                attempt.state, attempt.reason = "partial", "COMMIT is cut: the save did not finish"
                continue
            attempt.commit = unseal(data, str(path / COMMIT))
        except FileNotFoundError:
            attempt.state, attempt.reason = "partial", "no COMMIT: the save did not finish"
            continue
        except (OSError, DamagedCheckpoint) as error:
            attempt.state, attempt.reason = "damaged", str(error)
            continue
        reason = _disbelieve(attempt, generations)
        if reason:
            attempt.state, attempt.reason = "rejected", reason
    return sorted(found, key=lambda a: a.order, reverse=True)


def _disbelieve(attempt: Attempt, generations: dict[tuple[int, int], dict[str, Any]]) -> str:
    commit = attempt.commit or {}
    if commit.get("schema", 0) > SCHEMA:
        return f"written by a newer version (schema {commit['schema']}, this one knows {SCHEMA})"
    if commit.get("step") != attempt.step or commit.get("attempt") != attempt.attempt:
        return (
            f"COMMIT is of step {commit.get('step')} attempt {commit.get('attempt')}: the folder was renamed or mixed"
        )
    if not commit.get("finite", True):
        return "its weights are not all finite numbers"
    mine = (int(commit["epoch"]), int(commit["generation"]))
    for other, record in generations.items():
        resumed = record.get("resumed_from")
        if other > mine and resumed is not None and resumed < attempt.step:
            return (
                f"of generation {mine[0]}.{mine[1]}, whose steps above {resumed} were rolled back "
                f"by generation {other[0]}.{other[1]}"
            )
    return ""


def check_record_hash(path: Path, expected: dict[str, Any]) -> bytes:
    """Bytes of a small file that must have expected["bytes"] and expected["hash"]; raises DamagedCheckpoint."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from None
    if len(data) != expected["bytes"]:
        raise DamagedCheckpoint(f"{path}: {len(data)} bytes, committed with {expected['bytes']}")
    if digest(data) != expected["hash"]:
        raise DamagedCheckpoint(f"{path}: content differs from its committed hash")
    return data


def read_manifests(attempt: Attempt) -> list[dict[str, Any]]:
    """Manifests of all ranks of a committed attempt, in rank order, and the sizes of their files, all
    checked.

    Raises DamagedCheckpoint that names the first file which is missing, cut or different.
    """
    commit = attempt.commit
    if commit is None:
        raise DamagedCheckpoint(f"{attempt.path}: {attempt.reason}")
    check_record_hash(attempt.path / METADATA, commit["metadata"])
    manifests = []
    for item in commit["manifests"]:
        path = attempt.path / item["name"]
        manifest = unseal(check_record_hash(path, item), str(path))
        for entry in manifest["files"]:
            file = attempt.path / entry["name"]
            try:
                size = file.stat().st_size
            except OSError as error:
                raise DamagedCheckpoint(f"{file}: {error.strerror or error}") from None
            if size != entry["bytes"]:
                raise DamagedCheckpoint(f"{file}: {size} bytes, committed with {entry['bytes']}")
        manifests.append(manifest)
    if len(manifests) != commit["world_size"]:
        raise DamagedCheckpoint(f"{attempt.path}: {len(manifests)} manifests of {commit['world_size']} ranks")
    return manifests
