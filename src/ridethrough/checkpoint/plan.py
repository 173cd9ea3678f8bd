"""Which bytes of a state a rank stores, and where they lie in its file image.

The image is the rank's first `.distcp` file: archives of its tensors one after the other, each starting on 64
bytes. Replicated tensors (DDP, replicated mesh dimensions) are stored once, shared out over the ranks that
hold them; buffers, which may differ between ranks by design (batch statistics), come from the lowest rank;
tied tensors are stored once and named twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.layout import digest
from ridethrough.checkpoint.state import NamedTensor, State, local_of
from ridethrough.checkpoint.template import ALIGN, Template, template, works

PAGE = 4096
SMALL_BYTES = 1 << 16
Signature = tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@dataclass
class Placed:
    """A tensor that this rank stores: its live local memory, and the byte offset of its data in the image."""

    local: torch.Tensor
    offset: int
    nbytes: int
    fenced: bool
    form: Template
    is_weight: bool = False  # a parameter that an optimizer steps, of a floating dtype


@dataclass
class Plan:
    placed: list[Placed]
    entries: list[dict[str, Any]]
    image_bytes: int
    signature: Signature
    layout_hash: str = ""
    alone: bool = True  # this rank stores everything that it has
    weights: list[Placed] = field(default_factory=list)
    on_cpu: list[Placed] = field(default_factory=list)
    telling: list[Placed] = field(default_factory=list)
    unfenced: list[Placed] = field(default_factory=list)  # on the CPU
    fenced: list[Placed] = field(default_factory=list)  # on the CPU
    raw: bool = True  # the image is the file; False: torch writes the archives itself, from the image


@dataclass(frozen=True)
class Chunk:
    """Where a local tensor lies in the global one; `holders` are the ranks that hold the very same chunk."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holders: tuple[int, ...]


def signature(tensors: Sequence[NamedTensor]) -> Signature:
    """What must stay as it is for a plan to stay true: address, shape, strides and dtype of each local
    tensor."""
    out = []
    for named in tensors:
        tensor = named.tensor
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        out.append((named.fqn, local.data_ptr(), tuple(local.shape), tuple(local.stride()), local.dtype))
    return tuple(out)


def chunk_of(tensor: torch.Tensor, rank: int, world_size: int) -> Chunk:
    """Raises CheckpointError for a partial DTensor: it is no state but an unfinished sum."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Chunk(shape, (0,) * len(shape), shape, tuple(range(world_size)))
    if any(isinstance(p, Partial) for p in tensor.placements):
        raise CheckpointError("a partial DTensor cannot be saved; redistribute it first")
    mesh = tensor.device_mesh
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    coordinate = mesh.get_coordinate()
    holders: tuple[int, ...] = (rank,)
    if coordinate is not None and any(isinstance(p, Replicate) for p in tensor.placements):
        at: Any = tuple(
            slice(None) if isinstance(p, Replicate) else c for p, c in zip(tensor.placements, coordinate, strict=True)
        )
        holders = tuple(sorted(int(r) for r in mesh.mesh[at].reshape(-1).tolist()))
    return Chunk(tuple(tensor.shape), tuple(offsets), tuple(sizes), holders)


def make_plan(
    state: State, tensors: Sequence[NamedTensor], rank: int, world_size: int, shared: bool, own_small: bool = False
) -> Plan:
    """The plan of this rank. `own_small`: each rank stores its own buffers and small plain tensors, so that with
    sharded parameters it needs nobody else's share to go on. `shared=False` where the ranks' plain tensors are not
    known to be alike (pipeline stages): then each rank stores all of its own, and the index takes the first of
    equal ones."""
    chunks = [chunk_of(n.tensor, rank, world_size) for n in tensors]
    owners = _owners(tensors, chunks, rank, shared, SMALL_BYTES if own_small else -1)
    placed: list[Placed] = []
    entries: list[dict[str, Any]] = []
    stored: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    position = 0
    raw = works()
    for number, (named, chunk, owner) in enumerate(zip(tensors, chunks, owners, strict=True)):
        if owner != rank:
            continue
        local = local_of(named.tensor)
        entry: dict[str, Any] = {
            "k": named.fqn,
            "p": list(named.path),
            "d": str(local.dtype).removeprefix("torch."),
            "s": list(chunk.shape),
            "c": list(chunk.offsets),
            "z": list(chunk.sizes),
            "f": None,
            "i": number,
        }
        entries.append(entry)
        if local.numel() == 0:
            continue
        key = (local.data_ptr(), local.dtype, chunk.sizes, tuple(local.stride()), chunk.offsets)
        if key not in stored:
            form = template(local.dtype, tuple(local.shape)) if raw else Template(b"", b"", _nbytes(local))
            stored[key] = (position, form.total_bytes, position + len(form.prefix))
            weight = named.fenced and named.path[0] in state.modules and local.dtype.is_floating_point
            placed.append(Placed(local, position + len(form.prefix), form.data_bytes, named.fenced, form, weight))
            position += -(-form.total_bytes // ALIGN) * ALIGN
        entry["f"] = 0
        entry["o"], entry["n"], entry["x"] = stored[key]
    plan = Plan(placed, entries, -(-position // PAGE) * PAGE, signature(tensors), raw=raw)
    plan.weights = [i for i in placed if i.is_weight]
    plan.on_cpu = [i for i in placed if i.local.device.type != "cuda"]
    plan.fenced = [i for i in plan.on_cpu if i.fenced]
    plan.unfenced = [i for i in plan.on_cpu if not i.fenced]
    plan.alone = all(owner == rank for owner in owners)
    plan.layout_hash = digest(json.dumps(entries, separators=(",", ":")).encode())
    return plan


def _owners(
    tensors: Sequence[NamedTensor], chunks: Sequence[Chunk], rank: int, shared: bool, small_bytes: int
) -> list[int]:
    """Which rank stores each tensor: all ranks that hold a chunk compute the same answer, each for itself."""
    owners = [rank] * len(chunks)
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    aliases: dict[tuple[int, tuple[int, ...]], int] = {}

    def size(index: int) -> int:
        return _volume(chunks[index].shape) * tensors[index].tensor.element_size()

    for index in sorted(range(len(chunks)), key=lambda i: (-size(i), tensors[i].fqn)):
        chunk, named = chunks[index], tensors[index]
        if len(chunk.holders) == 1:
            owners[index] = chunk.holders[0]
            continue
        if not isinstance(named.tensor, DTensor) and not shared:
            continue
        if small_bytes >= 0 and (named.is_buffer or size(index) <= small_bytes):
            continue
        alias = (id(named.tensor), chunk.holders)
        if alias in aliases:
            owners[index] = aliases[alias]
            continue
        load = loads.setdefault(chunk.holders, dict.fromkeys(chunk.holders, 0))
        owner = chunk.holders[0] if named.is_buffer else min(load, key=lambda r: (load[r], r))
        load[owner] += size(index)
        owners[index] = aliases[alias] = owner
    return owners


def replicated_hash(tensors: Sequence[NamedTensor]) -> str:
    """What the ranks compare before they share out plain tensors: names, shapes and dtypes of them all."""
    plain = [[n.fqn, list(n.tensor.shape), str(n.tensor.dtype)] for n in tensors if not isinstance(n.tensor, DTensor)]
    return digest(json.dumps(plain).encode())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _volume(shape: Sequence[int]) -> int:
    n = 1
    for dim in shape:
        n *= dim
    return n
