"""DCP's `.metadata`, written without torch.

The keeper commits after every worker may be dead, and must not import torch (seconds, hundreds of megabytes).
The file is a pickle of a few dataclasses of `torch.distributed.checkpoint`; this module emits the same pickle
opcodes by hand, from the manifests. `selftest` (called by a worker, which has torch) proves that the
installed torch reads it back as its own objects; if not, `ridethrough.checkpoint.dcpindex_torch` writes the
file with torch in a process of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

_METADATA = ("torch.distributed.checkpoint.metadata", "Metadata")
_TENSOR = ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
_PROPERTIES = ("torch.distributed.checkpoint.metadata", "TensorProperties")
_CHUNK = ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
_BYTES = ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
_INDEX = ("torch.distributed.checkpoint.metadata", "MetadataIndex")
_STORAGE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def _global(name: tuple[str, str]) -> bytes:
    return b"c" + name[0].encode() + b"\n" + name[1].encode() + b"\n"


def _value(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, int):
        if 0 <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes((value.bit_length() // 8) + 1, "little", signed=True)
        return b"\x8a" + struct.pack("<B", len(data)) + data
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_value, value)) + b"t"
    raise TypeError(f"cannot write {type(value).__name__} into .metadata")


def _object(name: tuple[str, str], state: Iterable[tuple[str, bytes]]) -> bytes:
    return _global(name) + b")\x81}(" + b"".join(_value(k) + v for k, v in state) + b"ub"


def _size(dims: Sequence[int]) -> bytes:
    return _global(("torch", "Size")) + _value(tuple(dims)) + b"\x85R"


def _dict(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(k + v for k, v in items) + b"u"


def _properties(dtype: str) -> bytes:
    layout = _global(("torch.serialization", "_get_layout")) + _value("torch.strided") + b"\x85R"
    memory = _global((_METADATA[0], "_MEM_FORMAT_ENCODING")) + _value(0) + b"\x85R"
    state = b"(" + _global(("torch", dtype)) + layout + b"\x89" + memory + b"\x89t"
    return _global(_PROPERTIES) + b")\x81" + state + b"b"


def build(manifests: Sequence[dict[str, Any]]) -> bytes:
    """The bytes of `.metadata` for these manifests (rank order). The first writer of a chunk wins.

    Raises ValueError when a tensor's chunks do not cover it exactly, naming it.
    """
    tensors: dict[str, dict[str, Any]] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    values: dict[str, None] = {}
    storage: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for manifest in manifests:
        names = [f["name"] for f in manifest["files"]]
        for entry in manifest["entries"]:
            fqn = entry["k"]
            paths[fqn] = tuple(entry["p"])
            if "d" not in entry:
                values[fqn] = None
                storage.setdefault((fqn, None), (names[entry["f"]], entry["o"], entry["n"]))
                continue
            known = tensors.setdefault(fqn, entry)
            if known["s"] != entry["s"] or known["d"] != entry["d"]:
                raise ValueError(
                    f"{fqn}: rank {manifest['rank']} has {entry['d']} {entry['s']}, another {known['d']} {known['s']}"
                )
            mine = chunks.setdefault(fqn, {})
            if entry["f"] is None:
                continue
            offsets = tuple(entry["c"])
            if offsets not in mine:
                mine[offsets] = tuple(entry["z"])
                storage[fqn, offsets] = (names[entry["f"]], entry["o"], entry["n"])
    for fqn, entry in tensors.items():
        want, have = _volume(entry["s"]), sum(_volume(z) for z in chunks[fqn].values())
        if want != have:
            raise ValueError(f"{fqn}: the ranks wrote {have} of {want} elements")
    states = [
        (
            _value(fqn),
            _object(
                _TENSOR,
                [
                    ("properties", _properties(entry["d"])),
                    ("size", _size(entry["s"])),
                    ("chunks", b"](" + b"".join(_chunk(o, z) for o, z in chunks[fqn].items()) + b"e"),
                ],
            ),
        )
        for fqn, entry in tensors.items()
    ] + [(_value(fqn), _global(_BYTES) + b")\x81") for fqn in values]
    infos = [(_index(fqn, offsets), _info(*where)) for (fqn, offsets), where in storage.items()]
    planner = [(_value(fqn), _value(path)) for fqn, path in paths.items()]
    body = _object(
        _METADATA,
        [
            ("state_dict_metadata", _dict(states)),
            ("planner_data", _dict(planner)),
            ("storage_data", _dict(infos)),
            ("storage_meta", b"N"),
            ("version", _value("1.0.0")),
        ],
    )
    return b"\x80\x02" + body + b"."


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    return _object(_CHUNK, [("offsets", _size(offsets)), ("sizes", _size(sizes))])


def _index(fqn: str, offsets: tuple[int, ...] | None) -> bytes:
    offset = b"N" if offsets is None else _size(offsets)
    return _object(_INDEX, [("fqn", _value(fqn)), ("index", b"N"), ("offset", offset)])


def _info(name: str, offset: int, length: int) -> bytes:
    return _object(_STORAGE, [("relative_path", _value(name)), ("offset", _value(offset)), ("length", _value(length))])


def _volume(dims: Sequence[int]) -> int:
    volume = 1
    for n in dims:
        volume *= n
    return volume
