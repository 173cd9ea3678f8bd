"""Reading a committed checkpoint into live tensors: each byte is hashed on its way, and goes straight to
where it belongs.

A rank reads the hash chunks that its shards need, and also its share of all others, so that between them the
ranks verify every byte. A chunk that differs raises DamagedCheckpoint naming file and chunk. Where a shard
lies across several saved chunks (another world size), the overlaps are copied.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridethrough.checkpoint import fileops
from ridethrough.checkpoint.errors import DamagedCheckpoint, StateMismatch
from ridethrough.checkpoint.layout import digest

READ_THREADS = max(1, min(4, os.cpu_count() or 1))
MAX_PIECES = 1024  # of one preadv


@dataclass
class Saved:
    """One stored chunk of a tensor (or a value): which file, where its raw data starts, how many bytes."""

    file: str
    offset: int
    nbytes: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str | None
    shape: tuple[int, ...]
    number: int = 0


@dataclass
class Wanted:
    """A piece of the live state: memory of this rank (`local`), and where it lies in the global tensor."""

    fqn: str
    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Index:
    """What a checkpoint holds, from its manifests."""

    def __init__(self, folder: Path, manifests: Sequence[dict[str, Any]]) -> None:
        self.folder = folder
        self.world_size = len(manifests)
        self.tensors: dict[str, list[Saved]] = {}
        self.values: dict[str, Saved] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.file_rank: dict[str, int] = {}
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for manifest in manifests:
            names = [f["name"] for f in manifest["files"]]
            for file in manifest["files"]:
                self.files[file["name"]] = file
                self.file_rank[file["name"]] = manifest["rank"]
            for entry in manifest["entries"]:
                if "d" not in entry:
                    self.values.setdefault(
                        entry["k"], Saved(names[entry["f"]], entry["o"], entry["n"], (), (), None, ())
                    )
                    continue
                chunks = self.tensors.setdefault(entry["k"], [])
                offsets = tuple(entry["c"])
                if (entry["k"], offsets) in seen:
                    continue
                seen.add((entry["k"], offsets))
                size = 0 if entry["f"] is None else _nbytes(entry["z"], entry["d"])
                chunks.append(
                    Saved(
                        "" if entry["f"] is None else names[entry["f"]],
                        entry.get("x", 0),
                        size,
                        tuple(entry["z"]),
                        offsets,
                        entry["d"],
                        tuple(entry["s"]),
                        entry.get("i", 0),
                    )
                )

    def reader(self, rank: int, world_size: int) -> Reader:
        """A reader of this index for one rank."""
        return Reader(self, rank, world_size)

    def keys(self) -> set[str]:
        return self.tensors.keys() | self.values.keys()


def _nbytes(sizes: Sequence[int], dtype: str) -> int:
    n: int = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    for dim in sizes:
        n *= dim
    return n


@dataclass
class _Read:
    """Bytes [start, end) of a file go to `target` (a flat uint8 CPU tensor of that length)."""

    start: int
    end: int
    target: torch.Tensor


class Reader:
    """Collects what is wanted, then reads it in one pass. Called on one thread; reads with a few."""

    def __init__(self, index: Index, rank: int, world_size: int) -> None:
        self.index, self.rank, self.world_size = index, rank, world_size
        self._reads: dict[str, list[_Read]] = {}
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []

    def want(self, wanted: Wanted) -> None:
        """Ask for a tensor. Raises StateMismatch when its shape or dtype is not the saved one."""
        chunks = self.index.tensors[wanted.fqn]
        saved = chunks[0]
        local = wanted.local
        if saved.shape != wanted.shape or saved.dtype != str(local.dtype).removeprefix("torch."):
            raise StateMismatch(
                f"{wanted.fqn}: the checkpoint has {saved.dtype} {list(saved.shape)}, "
                f"the state has {str(local.dtype).removeprefix('torch.')} {list(wanted.shape)}"
            )
        if local.numel() == 0:
            return
        direct = local.device.type == "cpu" and local.is_contiguous()
        covered = 0
        for chunk in chunks:
            if chunk.nbytes == 0:
                continue
            box = _overlap(chunk, wanted)
            if box is None:
                continue
            lows, sizes = box
            covered += _volume(sizes)
            whole = tuple(sizes) == chunk.sizes == wanted.sizes
            if whole and direct:
                self._read(chunk, _flat(local))
                continue
            if whole and self._whole(chunk, local):
                continue
            staging = torch.empty(chunk.sizes, dtype=local.dtype, pin_memory=local.is_cuda)
            self._read(chunk, _flat(staging))
            source, target = staging, local
            for dim, (low, size) in enumerate(zip(lows, sizes, strict=True)):
                source = source.narrow(dim, low - chunk.offsets[dim], size)
                target = target.narrow(dim, low - wanted.offsets[dim], size)
            self._after.append((target, source))
        if covered != local.numel():
            raise DamagedCheckpoint(
                f"{self.index.folder}: {wanted.fqn}: {covered} of {local.numel()} elements "
                "of this rank's shard are stored"
            )

    def _whole(self, chunk: Saved, local: torch.Tensor) -> bool:
        """Arrange for a whole shard that can't be read into directly; False where there is no better way."""
        return False

    def value(self, key: str) -> bytearray:
        """Ask for a small value; the bytes are there after `run`."""
        saved = self.index.values[key]
        data = bytearray(saved.nbytes)
        self._read(saved, torch.frombuffer(data, dtype=torch.uint8))
        return data

    def _read(self, saved: Saved, target: torch.Tensor) -> None:
        self._reads.setdefault(saved.file, []).append(_Read(saved.offset, saved.offset + saved.nbytes, target))

    def run(self) -> int:
        """Read and verify; returns the bytes read. Raises DamagedCheckpoint."""
        with torch.no_grad():
            total = self._read_chunks(self._jobs())
            for target, source in self._after:
                target.copy_(source, non_blocking=True)  # from pinned memory where the target is on CUDA
            if any(target.is_cuda for target, _source in self._after):
                torch.cuda.synchronize()
        self._after.clear()
        self._reads.clear()
        return total

    def verify(self) -> None:
        """Read this rank's share of all bytes against their hashes, into nothing. Raises DamagedCheckpoint."""
        self._read_chunks([(name, number, []) for name, number, _reads in self._jobs() if self._mine(name)])

    def _mine(self, name: str) -> bool:
        return self.index.file_rank[name] % self.world_size == self.rank

    def _jobs(self) -> list[tuple[str, int, list[_Read]]]:
        """The hash chunks to read: those that hold what is wanted, and the share of the others."""
        jobs: list[tuple[str, int, list[_Read]]] = []
        for name, file in self.index.files.items():
            size, step = file["bytes"], file["chunk_bytes"]
            hits: dict[int, list[_Read]] = {}
            for read in sorted(self._reads.get(name, []), key=lambda r: r.start):
                for number in range(read.start // step, -(-read.end // step)):
                    hits.setdefault(number, []).append(read)
            wanted = range(-(-size // step)) if self._mine(name) else sorted(hits)
            jobs += [(name, number, hits.get(number, [])) for number in wanted]
        return jobs

    def _read_chunks(self, jobs: list[tuple[str, int, list[_Read]]]) -> int:
        if len(jobs) <= 1:
            return sum(map(self._chunk, jobs))
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="rt-read") as pool:
            return sum(pool.map(self._chunk, jobs))

    def _chunk(self, job: tuple[str, int, list[_Read]]) -> int:
        name, number, reads = job
        file = self.index.files[name]
        start = number * file["chunk_bytes"]
        size = min(file["chunk_bytes"], file["bytes"] - start)
        path = self.index.folder / name
        shared = any(later.start < earlier.end for earlier, later in itertools.pairwise(reads))
        pieces = [_spare(size)] if shared else _pieces(reads, start, start + size)
        fileops.reading("read", path)
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                _fill(fd, pieces, start, path)
            finally:
                os.close(fd)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from error
        if digest(*pieces) != file["hashes"][number]:
            raise DamagedCheckpoint(f"{path}: bytes {start}..{start + size} differ from their committed hash")
        if shared:  # tied tensors: the same bytes are wanted several times
            whole = torch.frombuffer(pieces[0], dtype=torch.uint8)
            for read in reads:
                low, high = max(read.start, start), min(read.end, start + size)
                read.target[low - read.start : high - read.start].copy_(whole[low - start : high - start])
        return int(size)


def _pieces(reads: list[_Read], start: int, end: int) -> list[memoryview]:
    """Where bytes [start, end) of a file go, in order: straight into their targets, the rest into spare memory."""
    pieces: list[memoryview] = []
    at = start
    for read in reads:
        low, high = max(read.start, start), min(read.end, end)
        if low > at:
            pieces.append(_spare(low - at))
        target: Any = read.target[low - read.start : high - read.start].numpy()
        pieces.append(memoryview(target))
        at = high
    if at < end:
        pieces.append(_spare(end - at))
    return pieces


def _spare(size: int) -> memoryview:
    buffer: Any = torch.empty(size, dtype=torch.uint8).numpy()
    return memoryview(buffer)


def _fill(fd: int, pieces: list[memoryview], at: int, path: Path) -> None:
    """Read the file from byte `at` on into the pieces. Raises DamagedCheckpoint where it ends early."""
    left = list(pieces)
    while left:
        count = os.preadv(fd, left[:MAX_PIECES], at)
        if count == 0:
            raise DamagedCheckpoint(f"{path}: ends at byte {at}, and was committed with more")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _overlap(chunk: Saved, wanted: Wanted) -> tuple[list[int], list[int]] | None:
    lows, sizes = [], []
    for co, cs, wo, ws in zip(chunk.offsets, chunk.sizes, wanted.offsets, wanted.sizes, strict=True):
        low, high = max(co, wo), min(co + cs, wo + ws)
        if low >= high:
            return None
        lows.append(low)
        sizes.append(high - low)
    return lows, sizes


def _volume(sizes: Sequence[int]) -> int:
    return math.prod(sizes)


def load_value(data: bytes | bytearray) -> Any:
    """A small value from its stored bytes. It is a pickle: only roots that you trust may be loaded."""
    return torch.load(io.BytesIO(bytes(data)), weights_only=False, map_location="cpu")
