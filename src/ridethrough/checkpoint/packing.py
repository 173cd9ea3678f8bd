"""Small values on their way into a snapshot: packed on the copy thread, and only if they have changed."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch

from ridethrough.checkpoint.archive import pack
from ridethrough.checkpoint.arena import Arena
from ridethrough.checkpoint.compare import same_value
from ridethrough.checkpoint.copier import target_view
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.plan import Plan

Values = list[tuple[str, list[str | int], Any]]


class Packer:
    """Remembers the archives of values that stay as they are from step to step. Copy thread only."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, bytes]] = {}

    def pack(self, values: Values, tail: bytearray, entries: list[dict[str, Any]]) -> None:
        """Append each value's archive to `tail` and its place to `entries`. Raises what pickling raises."""
        for key, path, value in values:
            known = self._known.get(key)
            if known is None or not same_value(known[0], value):
                known = self._known[key] = (value, pack(value))
            blob = known[1]
            entries.append({"k": key, "p": path, "f": 1, "o": len(tail), "n": len(blob)})
            tail += blob


def archive_by_torch(plan: Plan, arena: Arena, tail: bytearray, entries: list[dict[str, Any]]) -> None:
    """Where torch's archives are not of the known form: let torch write them, out of the arena. Slower, and
    said once."""
    warnings.warn("this torch stores tensors in an unknown form; saves go through torch.save", stacklevel=2)
    archives: dict[int, tuple[int, int, int]] = {}
    for item in plan.placed:
        file = io.BytesIO()
        torch.save(target_view(arena, item).clone(), file)
        blob = file.getvalue()
        raw = bytes(arena.map[item.offset : item.offset + item.nbytes])
        data_at = blob.find(raw)
        if data_at < 0:
            raise CheckpointError(
                "torch.save does not store a tensor's bytes as they are: no checkpoint can be written"
            )
        archives[item.offset] = (len(tail), len(blob), len(tail) + data_at)
        tail += blob
    for entry in plan.entries:
        if entry["f"] is None:
            entries.append(entry)
        else:
            start, size, data_at = archives[entry["x"]]
            entries.append({**entry, "f": 1, "o": start, "n": size, "x": data_at})
