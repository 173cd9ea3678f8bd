"""A whole checkpoint in one file, for tools that know nothing of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridethrough.checkpoint import layout
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.restore import Index, Reader, Wanted, load_value


def write_export(attempt: layout.Attempt, target: Path, only: str | None) -> dict[str, Any]:
    """See `inspect.export`. Every byte is verified on the way."""
    manifests = layout.read_manifests(attempt)
    index = Index(attempt.path, manifests)
    paths = {e["k"]: tuple(e["p"]) for m in manifests for e in m["entries"]}
    chosen = {k for k in paths if only is None or paths[k][0] == only}
    if not chosen:
        raise CheckpointError(f"{attempt.path} holds nothing called {only!r}; see `ckpt show`")
    reader = Reader(index, 0, 1)
    tensors: dict[str, torch.Tensor] = {}
    for key in sorted(chosen & index.tensors.keys()):
        saved = index.tensors[key][0]
        tensors[key] = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype or "float32"))
        reader.want(Wanted(key, tensors[key], saved.shape, (0,) * len(saved.shape), saved.shape))
    raw = {key: reader.value(key) for key in sorted(chosen & index.values.keys())}
    reader.run()
    if target.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise CheckpointError("exporting safetensors needs the package: pip install 'ridethrough[hf]'") from None
        prefix = f"{only}." if only else ""
        save_file({k.removeprefix(prefix): v for k, v in tensors.items()}, str(target), {"step": str(attempt.step)})
        values = 0
    else:
        nested: dict[str, Any] = {}
        for key in sorted(chosen, key=lambda k: [str(p).zfill(9) for p in paths[k]]):
            value = tensors[key] if key in tensors else load_value(raw[key])
            _put(nested, paths[key], value)
        torch.save(nested if only is None else nested[only], target)
        values = len(raw)
    return {"path": str(target), "step": attempt.step, "tensors": len(tensors), "values": values,
            "bytes": target.stat().st_size}  # fmt: skip


def _put(nested: Any, path: tuple[Any, ...], value: Any) -> None:
    for here, below in zip(path, [*path[1:], None], strict=True):
        fresh: Any = value if below is None else [] if isinstance(below, int) else {}
        if isinstance(here, int):
            while len(nested) <= here:
                nested.append(None)
            if nested[here] is None or below is None:
                nested[here] = fresh
        elif below is None:
            nested[here] = fresh
        else:
            nested.setdefault(here, fresh)
        nested = nested[here]
