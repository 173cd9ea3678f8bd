"""python -m ridethrough.checkpoint.dcpindex_torch FOLDER > .metadata

DCP's index made by torch itself, from the manifests in an attempt's folder: what the keeper falls back to
when `trusted` has found that the installed torch does not read `dcpindex`'s bytes as its own objects. Takes
seconds (it imports torch).
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ridethrough.checkpoint import dcpindex
from ridethrough.checkpoint.layout import unseal


def metadata(manifests: Sequence[dict[str, Any]]) -> Metadata:
    """The same index as `dcpindex.build`, as torch's objects."""
    tensors: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for manifest in manifests:
        names = [f["name"] for f in manifest["files"]]
        for entry in manifest["entries"]:
            fqn = entry["k"]
            paths[fqn] = tuple(entry["p"])
            if "d" not in entry:
                tensors.setdefault(fqn, BytesStorageMetadata())
                storage.setdefault(MetadataIndex(fqn), _StorageInfo(names[entry["f"]], entry["o"], entry["n"]))
                continue
            properties = TensorProperties(dtype=getattr(torch, entry["d"]))
            known = tensors.setdefault(fqn, TensorStorageMetadata(properties, torch.Size(entry["s"]), []))
            if entry["f"] is None:
                continue
            index = MetadataIndex(fqn, torch.Size(entry["c"]))
            if index not in storage:
                known.chunks.append(ChunkStorageMetadata(torch.Size(entry["c"]), torch.Size(entry["z"])))
                storage[index] = _StorageInfo(names[entry["f"]], entry["o"], entry["n"])
    made = Metadata(tensors, paths, storage)
    made.version = "1.0.0"
    return made


_SAMPLE = [
    {
        "rank": rank,
        "files": [{"name": f"__{rank}_0.distcp"}, {"name": f"__{rank}_1.distcp"}],
        "entries": [
            {"k": "m.w", "p": ["m", "w"], "d": "bfloat16", "s": [6, 2], "c": [3 * rank, 0], "z": [3, 2],
             "f": 0, "o": 64 * rank + (5 << 32), "n": 1200},
            {"k": "o.s", "p": ["o", "s"], "d": "float32", "s": [], "c": [], "z": [], "f": 0, "o": 9, "n": 8},
            {"k": "e", "p": ["e"], "d": "int64", "s": [0], "c": [0], "z": [0], "f": None},
            {"k": f"rng.rank{rank}", "p": ["rng", f"rank{rank}"], "f": 1, "o": 0, "n": 70},
            {"k": "o.param_groups.0.lr", "p": ["o", "param_groups", 0, "lr"], "f": 1, "o": 70, "n": 7},
        ],
    }
    for rank in range(2)
]  # fmt: skip


@functools.lru_cache(maxsize=1)
def trusted() -> bool:
    """Whether the installed torch reads the hand-written index as exactly the objects that it would have
    written."""
    try:
        return bool(pickle.loads(dcpindex.build(_SAMPLE)) == metadata(_SAMPLE))
    except Exception:  # whatever a changed torch raises here means the same: do not trust it
        return False


def main(folder: Path) -> None:
    manifests: list[dict[str, Any]] = []
    while (path := folder / f"rank-{len(manifests)}.json").exists():
        manifests.append(unseal(path.read_bytes(), str(path)))
    sys.stdout.buffer.write(pickle.dumps(metadata(manifests)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
