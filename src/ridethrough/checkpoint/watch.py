"""Is the state still made of the same tensors? Asked at every boundary, so it must cost microseconds.

A full look at a state runs the modules' `state_dict` with its hooks, which takes milliseconds for a large model. The
watch remembers which object lay where (parameters and buffers in their modules, tensors in the optimizers' state, the
memory behind each) and compares identities; anything else than "all the same" means a full look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ridethrough.checkpoint.state import NamedTensor, Path, State


class Watch:
    """One look at `state`. Training thread only."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.tensors: list[NamedTensor] = state.tensors()
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        for module in state.modules.values():
            for part in module.modules():
                for holder in (part._parameters, part._buffers, part._modules):
                    self._sizes.append((holder, len(holder)))
                    self._places += [(holder, key, value) for key, value in holder.items()]
        for optimizer in state.optimizers.values():
            self._sizes += [
                (optimizer.param_groups, len(optimizer.param_groups)),
                (optimizer.state, len(optimizer.state)),
            ]
            self._sizes += [(group["params"], len(group["params"])) for group in optimizer.param_groups]
            for held in optimizer.state.values():
                self._sizes.append((held, len(held)))
                self._places += [(held, key, value) for key, value in held.items() if isinstance(value, torch.Tensor)]
        self._holders = [id(o.state) for o in state.optimizers.values()]
        self._memory: list[tuple[Any, int, torch.Size]] = []
        for named in self.tensors:
            tensor = named.tensor
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            self._memory.append((tensor, local.data_ptr(), local.shape))
        self._names = state.parameter_names()
        self._params = {
            (name, index): [self._names[id(p)] for p in group["params"]]
            for name, optimizer in state.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if all(id(p) in self._names for p in group["params"])
        }
        self._only_groups = not any(path[1] != "param_groups" for path, _value in state.shared_values())

    def same(self) -> bool:
        """Whether a full look would find what this one found."""
        if any(len(holder) != size for holder, size in self._sizes):
            return False
        if any(holder.get(key) is not value for holder, key, value in self._places):
            return False
        if [id(o.state) for o in self.state.optimizers.values()] != self._holders:
            return False
        for tensor, address, shape in self._memory:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if local.data_ptr() != address or local.shape != shape:
                return False
        return True

    def shared_values(self) -> Iterator[tuple[Path, Any]]:
        """As `State.shared_values`, without a full look where only the groups' options are left."""
        if not self._only_groups:
            yield from self.state.shared_values()
            return
        for name, optimizer in self.state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    yield (name, "param_groups", index, key), self._params[name, index] if key == "params" else value
