"""Putting a checkpoint into a live state: which key goes where, what is missing, what must be made first.

Tensors are filled in place. Optimizer state that does not exist yet (a fresh Adam) is made like its
parameter, sharded alike. Objects get `load_state_dict`, random states come last. Called on the training
thread of every rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch

from ridethrough.checkpoint.errors import StateMismatch
from ridethrough.checkpoint.plan import chunk_of
from ridethrough.checkpoint.restore import Index, Wanted, load_value
from ridethrough.checkpoint.state import RNG, State, local_of, set_rng_state


def load_into(
    state: State, index: Index, rank: int, world_size: int, missing_ok: Iterable[str], extra_ok: Iterable[str]
) -> tuple[list[str], list[str], list[str]]:
    """Fill `state` from the checkpoint; returns (missing keys, extra keys, notes).

    Raises StateMismatch for keys that are missing or extra and match none of the allowed patterns (fnmatch),
    or for other shapes; DamagedCheckpoint for bytes that differ.
    """
    _make_optimizer_state(state, index)
    live = state.tensors()
    reader = index.reader(rank, world_size)
    wanted_keys: set[str] = set()
    missing: list[str] = []
    for named in live:
        wanted_keys.add(named.fqn)
        if named.fqn not in index.tensors:
            missing.append(named.fqn)
            continue
        chunk = chunk_of(named.tensor, rank, world_size)
        reader.want(Wanted(named.fqn, local_of(named.tensor), chunk.shape, chunk.offsets, chunk.sizes))
    shared = {".".join(map(str, path)): path for path, _value in state.shared_values()}
    for name in state.optimizers:
        for key in index.values:
            if key.startswith(f"{name}.state."):
                shared.setdefault(key, (name, "state", *key.removeprefix(f"{name}.state.").rsplit(".", 1)))
    raw_shared: dict[str, bytearray] = {}
    for key in shared:
        wanted_keys.add(key)
        if key in index.values:
            raw_shared[key] = reader.value(key)
        else:
            missing.append(key)
    raw_mine: dict[str, bytearray] = {}
    notes: list[str] = []
    names = [*state.objects, *state.values, *([RNG] if state.rng else [])]
    for name in names:
        wanted_keys |= {f"{name}.rank{r}" for r in range(max(index.world_size, world_size))}
        source = rank if rank < index.world_size else rank % index.world_size
        key = f"{name}.rank{source}"
        if key not in index.values:
            missing.append(f"{name}.rank{source}")
            continue
        raw_mine[name] = reader.value(key)
        if source != rank and name != RNG:
            notes.append(f"{name}: saved by {index.world_size} ranks; rank {rank} took rank {source}'s")
    extra = sorted(index.keys() - wanted_keys)
    if not state.rng:
        extra = [key for key in extra if not key.startswith(f"{RNG}.rank")]
    _refuse(index, [k for k in missing if not _allowed(k, missing_ok)], [k for k in extra if not _allowed(k, extra_ok)])
    reader.run()
    _finish_shared(state, shared, raw_shared)
    for name, data in raw_mine.items():
        if name in state.objects:
            state.objects[name].load_state_dict(load_value(data))
        elif name in state.values:
            state.values[name] = load_value(data)
    if state.rng and RNG in raw_mine:
        if rank < index.world_size:
            set_rng_state(load_value(raw_mine[RNG]))
        else:
            notes.append(f"rng: rank {rank} did not exist when this was saved; its generators were left as they are")
    return missing, extra, notes


def _allowed(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _refuse(index: Index, missing: list[str], extra: list[str]) -> None:
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} keys of the state are not in it: {_some(missing)}")
    if extra:
        parts.append(f"{len(extra)} keys of it are not in the state: {_some(extra)}")
    raise StateMismatch(
        f"{index.folder} is of another state; {'; '.join(parts)}. Allow them by name with allow_missing= / allow_extra="
    )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (f", ... ({len(keys) - 8} more)" if len(keys) > 8 else "")


def _make_optimizer_state(state: State, index: Index) -> None:
    """Create the optimizer tensors that the checkpoint has and the live optimizer has not, each like its
    parameter."""
    names = state.parameter_names()
    stored: dict[str, list[str]] = {}
    for key in sorted(index.tensors, key=lambda k: index.tensors[k][0].number):  # as the optimizer had made them
        for name in state.optimizers:
            if key.startswith(f"{name}.state."):
                fqn, _, leaf = key.removeprefix(f"{name}.state.").rpartition(".")
                stored.setdefault(f"{name}:{fqn}", []).append(leaf)
    for name, optimizer in state.optimizers.items():
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                fqn = names.get(id(parameter), "")
                existing = optimizer.state.get(parameter, {})
                for leaf in stored.get(f"{name}:{fqn}", ()):
                    saved = index.tensors[f"{name}.state.{fqn}.{leaf}"][0]
                    dtype = getattr(torch, saved.dtype or "float32")
                    if leaf in existing:
                        continue
                    if saved.shape == tuple(parameter.shape) and (parameter.dim() or leaf != "step"):
                        tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
                    else:
                        device = local_of(parameter).device if on_device or saved.shape else torch.device("cpu")
                        tensor = torch.zeros(saved.shape, dtype=dtype, device=device)
                    optimizer.state[parameter][leaf] = tensor


def _finish_shared(state: State, shared: dict[str, Any], raw: dict[str, bytearray]) -> None:
    names = state.parameter_names()
    for key, path in shared.items():
        if key not in raw:
            continue
        value = load_value(raw[key])
        name = path[0]
        if name in state.modules:
            _set_extra_state(state.modules[name], path[1], value)
        elif path[1] == "param_groups":
            group = state.optimizers[name].param_groups[path[2]]
            if path[3] == "params":
                live = [names.get(id(p)) for p in group["params"]]
                if live != value:
                    raise StateMismatch(
                        f"{name}: group {path[2]} steps {len(live)} parameters here, {len(value)} in the "
                        "checkpoint, or in another order"
                    )
            elif isinstance(group.get(path[3]), torch.Tensor) and isinstance(value, torch.Tensor):
                group[path[3]].copy_(value)
            else:
                group[path[3]] = value
        else:
            for parameter in (p for g in state.optimizers[name].param_groups for p in g["params"]):
                if names.get(id(parameter)) == path[2]:
                    state.optimizers[name].state[parameter][path[3]] = value


def _set_extra_state(module: torch.nn.Module, key: str, value: Any) -> None:
    owner, _, leaf = key.rpartition(".")
    if leaf == "_extra_state":
        module.get_submodule(owner).set_extra_state(value)
