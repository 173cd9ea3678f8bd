"""Reading what N ranks have stored as M ranks need it: every byte lands where it belongs, and some rank verifies it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ridethrough.checkpoint.errors import DamagedCheckpoint
from ridethrough.checkpoint.layout import digest
from ridethrough.checkpoint.restore import Index, Reader, Wanted

CHUNK_BYTES = 64  # so that tensors lie across many of them


def rows(count: int, world: int, rank: int) -> tuple[int, int]:
    """As `torch.chunk` has it."""
    size = -(-count // world)
    return min(count, rank * size), min(count, (rank + 1) * size)


def write(folder: Path, whole: dict[str, torch.Tensor], world: int, chance: random.Random) -> list[dict[str, Any]]:
    """One file for each rank with its rows of every tensor, odd gaps between them; "tied" is a second name of "a"."""
    manifests = []
    for rank in range(world):
        image, entries = bytearray(), []
        for name, tensor in whole.items():
            low, high = rows(len(tensor), world, rank)
            local = tensor[low:high].contiguous()
            at = None
            if local.numel():
                image += bytes(chance.randrange(40))
                at = len(image)
                image += local.numpy().tobytes()
            place = {"f": 0 if at is not None else None, "o": at, "n": local.nbytes, "x": at}
            about = {"d": "float32", "s": list(tensor.shape), "c": [low, 0], "z": list(local.shape), **place}
            names = [name, "tied"] if name == "a" else [name]
            entries += [{"k": key, "p": [key], **about} for key in names]
        image += bytes(chance.randrange(40))
        (folder / f"__{rank}_0.distcp").write_bytes(image)
        hashes = [digest(image[i : i + CHUNK_BYTES]) for i in range(0, len(image), CHUNK_BYTES)]
        file = {"name": f"__{rank}_0.distcp", "bytes": len(image), "chunk_bytes": CHUNK_BYTES, "hashes": hashes}
        manifests.append({"rank": rank, "files": [file], "entries": entries})
    return manifests


def read(index: Index, whole: dict[str, torch.Tensor], world: int, rank: int) -> None:
    """As one rank of `world`: its rows of everything, compared with what they should be."""
    reader, found = Reader(index, rank, world), {}
    for name, tensor in {**whole, "tied": whole["a"]}.items():
        low, high = rows(len(tensor), world, rank)
        found[name] = (torch.full((high - low, tensor.shape[1]), -1.0), tensor[low:high])
        sizes = tuple(found[name][0].shape)
        reader.want(Wanted(name, found[name][0], tuple(tensor.shape), (low, 0), sizes))
    reader.run()
    for name, (got, want) in found.items():
        assert torch.equal(got, want), (name, rank)


@pytest.mark.parametrize("saved_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 3, 5])
def test_any_world_reads_what_any_other_has_saved(tmp_path: Path, saved_by: int, read_by: int) -> None:
    chance = random.Random(10 * saved_by + read_by)
    whole = {name: torch.rand(chance.randrange(1, 40), 7) for name in "abc"}
    index = Index(tmp_path, write(tmp_path, whole, saved_by, chance))
    for rank in range(read_by):
        read(index, whole, read_by, rank)


def test_every_flipped_byte_is_found_by_some_rank(tmp_path: Path) -> None:
    chance = random.Random(5)
    whole = {name: torch.rand(5, 3) for name in "abc"}
    index = Index(tmp_path, write(tmp_path, whole, 2, chance))
    for path in sorted(tmp_path.iterdir()):
        good = path.read_bytes()
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            complaints = 0
            for rank in range(3):
                try:
                    read(index, whole, 3, rank)
                except DamagedCheckpoint as error:
                    complaints += path.name in str(error)
            assert complaints, at
        path.write_bytes(good[:-1])
        with pytest.raises(DamagedCheckpoint, match="ends at byte"):
            for rank in range(3):
                read(index, whole, 3, rank)
        path.write_bytes(good)
