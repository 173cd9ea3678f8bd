"""Is the state still made of the same tensors? Asked at every boundary, so it must cost microseconds.

A full look at a state runs the modules' `state_dict` with its hooks, which takes milliseconds for a large model. The
watch remembers which object lay where (parameters and buffers in their modules, tensors in the optimizers' state, the
memory behind each) and compares identities; anything else than "all the same" means a full look.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ridethrough.checkpoint.state import NamedTensor, Path, State


class Watch:
    """One look at `state`. Training thread only."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.tensors: list[NamedTensor] = state.tensors()
        # Dictionaries of nothing but what is watched; compared without a Python loop, since there are thousands.
        self._holders: list[dict[str, Any]] = []
        self._mixed: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # tensors beside other values
        self._sized: list[Any] = []
        for module in state.modules.values():
            for part in module.modules():
                self._holders += (part._parameters, part._buffers, part._modules)
        for optimizer in state.optimizers.values():
            self._sized += [optimizer.param_groups, optimizer.state]
            self._sized += [group["params"] for group in optimizer.param_groups]
            for held in optimizer.state.values():
                tensors = [(held, key, value) for key, value in held.items() if isinstance(value, torch.Tensor)]
                if len(tensors) == len(held):
                    self._holders.append(held)
                else:
                    self._sized.append(held)
                    self._mixed += tensors
        self._sized += self._holders
        self._sizes = list(map(len, self._sized))
        self._keys = list(chain.from_iterable(self._holders))
        self._values = list(chain.from_iterable(map(dict.values, self._holders)))
        self._states = [o.state for o in state.optimizers.values()]
        self._sharded = [n.tensor for n in self.tensors if isinstance(n.tensor, DTensor)]
        self._plain = [n.tensor for n in self.tensors if not isinstance(n.tensor, DTensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._locals()))
        self._shapes = list(map(torch.Tensor.size, self._locals()))
        self._names = state.parameter_names()
        self._params = {
            (name, index): [self._names[id(p)] for p in group["params"]]
            for name, optimizer in state.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if all(id(p) in self._names for p in group["params"])
        }
        self._only_groups = not any(path[1] != "param_groups" for path, _value in state.shared_values())

    def _locals(self) -> list[torch.Tensor]:
        return [*self._plain, *(t._local_tensor for t in self._sharded)]

    def same(self) -> bool:
        """Whether a full look would find what this one found."""
        return (
            list(map(len, self._sized)) == self._sizes
            and list(chain.from_iterable(self._holders)) == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, self._holders)), self._values))
            and all(holder.get(key) is value for holder, key, value in self._mixed)
            and all(o.state is known for o, known in zip(self.state.optimizers.values(), self._states, strict=True))
            and list(map(torch.Tensor.data_ptr, locals_ := self._locals())) == self._addresses
            and list(map(torch.Tensor.size, locals_)) == self._shapes
        )

    def shared_values(self) -> Iterator[tuple[Path, Any]]:
        """As `State.shared_values`, without a full look where only the groups' options are left."""
        if not self._only_groups:
            yield from self.state.shared_values()
            return
        for name, optimizer in self.state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    yield (name, "param_groups", index, key), self._params[name, index] if key == "params" else value
