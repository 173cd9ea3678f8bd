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

from ridethrough.checkpoint.errors import CheckpointError, StateMismatch
from ridethrough.checkpoint.plan import chunk_of
from ridethrough.checkpoint.restore import Index, Wanted, load_value
from ridethrough.checkpoint.state import RNG, State, local_of, set_rng_state


class Filling:
    """What filling `state` from the checkpoint takes. Making it changes nothing that the state holds (an optimizer's
    state that is not there yet is made), so that all ranks can agree to go on before any of them writes.

    Raises StateMismatch for keys that are missing or extra and match none of the allowed patterns (fnmatch), or for
    other shapes; DamagedCheckpoint where parts of a tensor are not there.
    """

    def __init__(
        self, state: State, index: Index, rank: int, world_size: int, missing_ok: Iterable[str], extra_ok: Iterable[str]
    ) -> None:
        self.state, self.index, self.rank = state, index, rank
        self.missing: list[str] = []
        self.extra: list[str] = []
        self.notes: list[str] = []
        self._reader = index.reader(rank, world_size)
        self._shared: dict[str, Any] = {}
        self._raw_shared: dict[str, bytearray] = {}
        self._raw_mine: dict[str, bytearray] = {}
        self._made = _make_optimizer_state(state, index)
        try:
            wanted = self._want_tensors(world_size) | self._want_shared() | self._want_mine(world_size)
            self.extra = sorted(index.keys() - wanted)
            if not state.rng:
                self.extra = [key for key in self.extra if not key.startswith(f"{RNG}.rank")]
            missing = [k for k in self.missing if not _allowed(k, missing_ok)]
            _refuse(index, missing, [k for k in self.extra if not _allowed(k, extra_ok)])
        except Exception:  # raised again: whatever it is, the state must be as it was
            self.undo()
            raise

    def undo(self) -> None:
        """It will not be filled: take away the optimizer's state that was made for it."""
        for optimizer, parameter, leaf in self._made:
            del optimizer.state[parameter][leaf]
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
        self._made.clear()

    def verify(self) -> None:
        """Check this rank's share of the checkpoint's bytes; the state stays as it is. Raises DamagedCheckpoint."""
        try:
            self._reader.verify()
        except CheckpointError:
            self.undo()
            raise

    def fill(self) -> None:
        """Read into the state. Raises DamagedCheckpoint for bytes that differ: the state is of no step then."""
        state, index = self.state, self.index
        self._reader.run()
        _finish_shared(state, self._shared, self._raw_shared)
        for name, data in self._raw_mine.items():
            if name in state.objects:
                state.objects[name].load_state_dict(load_value(data))
            elif name in state.values:
                state.values[name] = load_value(data)
        if RNG in self._raw_mine:
            if self.rank < index.world_size:
                set_rng_state(load_value(self._raw_mine[RNG]))
            else:
                self.notes.append(
                    f"rng: rank {self.rank} did not exist when this was saved; its generators were left as they are"
                )

    def _want_tensors(self, world_size: int) -> set[str]:
        wanted = set()
        for named in self.state.tensors():
            wanted.add(named.fqn)
            if named.fqn not in self.index.tensors:
                self.missing.append(named.fqn)
                continue
            chunk = chunk_of(named.tensor, self.rank, world_size)
            self._reader.want(Wanted(named.fqn, local_of(named.tensor), chunk.shape, chunk.offsets, chunk.sizes))
        return wanted

    def _want_shared(self) -> set[str]:
        self._shared = {".".join(map(str, path)): path for path, _value in self.state.shared_values()}
        for name in self.state.optimizers:
            for key in self.index.values:
                if key.startswith(f"{name}.state."):
                    self._shared.setdefault(key, (name, "state", *key.removeprefix(f"{name}.state.").rsplit(".", 1)))
        for key in self._shared:
            if key in self.index.values:
                self._raw_shared[key] = self._reader.value(key)
            else:
                self.missing.append(key)
        return set(self._shared)

    def _want_mine(self, world_size: int) -> set[str]:
        """Of each object, value and the random states: what the rank of this number had."""
        wanted: set[str] = set()
        saved_by = self.index.world_size
        source = self.rank % saved_by
        for name in [*self.state.objects, *self.state.values, *([RNG] if self.state.rng else [])]:
            wanted |= {f"{name}.rank{r}" for r in range(max(saved_by, world_size))}
            key = f"{name}.rank{source}"
            if key not in self.index.values:
                self.missing.append(key)
                continue
            self._raw_mine[name] = self._reader.value(key)
            if source != self.rank and name != RNG:
                self.notes.append(f"{name}: saved by {saved_by} ranks; rank {self.rank} took rank {source}'s")
        return wanted


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


def _make_optimizer_state(state: State, index: Index) -> list[tuple[torch.optim.Optimizer, torch.Tensor, str]]:
    """Create the optimizer tensors that the checkpoint has and the live optimizer has not, each like its
    parameter; returns where."""
    made: list[tuple[torch.optim.Optimizer, torch.Tensor, str]] = []
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
                    made.append((optimizer, parameter, leaf))
    return made


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
