"""What a training state is: everything that makes the next step what it would have been.

    state = State(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=3)

Modules and torch optimizers are stored tensor by tensor under DCP's usual names (`model.<fqn>`,
`optimizer.state.<fqn>.exp_avg`), sharded as they are. Anything else with `state_dict` / `load_state_dict` is
stored per rank, and so are plain values and random states.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ridethrough.checkpoint.errors import CheckpointError, StateMismatch

RNG = "rng"
Path = tuple[str | int, ...]
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class NamedTensor:
    """A tensor of the state. `fenced`: an optimizer owns it, so it stands still until that optimizer's next
    step."""

    fqn: str
    path: Path
    tensor: torch.Tensor
    fenced: bool
    is_buffer: bool = False


class State:
    """The objects of one rank's training state, by name.

    `rng=False` leaves the random generators out (python, numpy's global one, torch CPU and the current CUDA
    device). Plain values are read with `state["name"]` and set with `state["name"] = value`. Raises
    CheckpointError for objects that cannot be stored (FSDP1 modules, optimizer parameters that belong to no
    module of the state), with the remedy.
    """

    def __init__(self, rng: bool = True, **objects: Any) -> None:
        self.rng = rng
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.objects: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        for name, value in objects.items():
            if name == RNG or "." in name:
                raise CheckpointError(f"State({name}=...): this name is reserved; choose another")
            if isinstance(value, nn.Module):
                self.modules[name] = _unwrapped(value, name)
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[name] = value
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self.objects[name] = value
            else:
                self.values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[name] = value

    def drop(self) -> None:
        """Forget every object, so that nothing of a generation that is over keeps its tensors alive."""
        self.modules, self.optimizers, self.objects, self.values = {}, {}, {}, {}

    # -- what there is ----------------------------------------------------------------------------------------------
    def module_entries(self) -> Iterator[tuple[str, str, Any, bool]]:
        """(module name, key, live value, is it a buffer). Runs the modules' state-dict hooks, so FSDP2 is
        resharded."""
        for name, module in self.modules.items():
            for key, value in module.state_dict(keep_vars=True).items():
                yield name, _clean(key), value, not isinstance(value, nn.Parameter)

    def tensors(self) -> list[NamedTensor]:
        """Every tensor of modules and optimizers, live, in a fixed order."""
        found: list[NamedTensor] = []
        fenced = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        for name, key, value, is_buffer in self.module_entries():
            if isinstance(value, torch.Tensor):
                found.append(NamedTensor(f"{name}.{key}", (name, key), value, id(value) in fenced, is_buffer))
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    fqn = self._name_of(names, name, parameter)
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            path = (name, "state", fqn, key)
                            found.append(NamedTensor(f"{name}.state.{fqn}.{key}", path, value, True))
        return found

    def shared_values(self) -> Iterator[tuple[Path, Any]]:
        """Small values that are alike on all ranks; rank 0 stores them."""
        for name, key, value, _buffer in self.module_entries():
            if not isinstance(value, torch.Tensor):
                yield (name, key), value
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    stored = [self._name_of(names, name, p) for p in value] if key == "params" else value
                    yield (name, "param_groups", index, key), stored
                for parameter in group["params"]:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if not isinstance(value, torch.Tensor):
                            yield (name, "state", self._name_of(names, name, parameter), key), value

    def rank_values(self) -> Iterator[tuple[str, Any]]:
        """Values of this rank alone: objects' state, plain values, random states."""
        for name, thing in self.objects.items():
            yield name, thing.state_dict()
        for name, value in self.values.items():
            yield name, value
        if self.rng:
            yield RNG, rng_state()

    def parameter_names(self) -> dict[int, str]:
        """id(parameter) -> its name: the module's own where one module holds all parameters, else
        `<module>.<name>`."""
        names: dict[int, str] = {}
        for name, key, value, is_buffer in self.module_entries():
            if not is_buffer:
                names.setdefault(id(value), key if len(self.modules) == 1 else f"{name}.{key}")
        return names

    def _name_of(self, names: dict[int, str], optimizer: str, parameter: torch.Tensor) -> str:
        try:
            return names[id(parameter)]
        except KeyError:
            raise CheckpointError(
                f"{optimizer} steps a parameter of shape {tuple(parameter.shape)} that belongs to no module "
                "given to State; pass its module too (and build the optimizer after fully_shard)"
            ) from None


def _clean(key: str) -> str:
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _unwrapped(module: nn.Module, name: str) -> nn.Module:
    while True:
        kind = type(module).__name__
        if kind == "FullyShardedDataParallel":
            raise CheckpointError(f"State({name}=...): FSDP1 is not supported; use torch.distributed.fsdp.fully_shard")
        if kind in ("DistributedDataParallel", "DataParallel"):
            module = module.module  # type: ignore[assignment]
        elif kind == "OptimizedModule":
            module = module._orig_mod  # type: ignore[assignment]
        else:
            break
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        raise CheckpointError(f"State({name}=...): FSDP1 is not supported; use torch.distributed.fsdp.fully_shard")
    return module


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a tensor, detached: the local shard of a DTensor, the tensor itself
    otherwise."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return tensor.detach()


def freeze(value: Any, where: str) -> Any:
    """A copy that later changes of `value` do not reach; tensors come to the CPU. Raises CheckpointError for
    a DTensor, and for the ShardedTensor of FSDP1's state dicts."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or type(value).__name__ == "ShardedTensor":
            raise CheckpointError(
                f"{where}: a {type(value).__name__} inside an object's state_dict cannot be stored per rank; "
                "give its module to State, sharded by torch.distributed.fsdp.fully_shard"
            )
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {freeze(k, where): freeze(v, f"{where}.{k}") for k, v in value.items()}
    if type(value) is list:
        return [freeze(v, where) for v in value]
    if type(value) is tuple:
        return tuple(freeze(v, where) for v in value)
    return copy.deepcopy(value)


def rng_state() -> dict[str, Any]:
    """Random states of this process: python, numpy (if imported), torch CPU, and the current CUDA device (if
    in use)."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` gave. Raises StateMismatch when a part of it has no meaning here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        if not torch.cuda.is_available():
            raise StateMismatch(
                "the checkpoint holds a CUDA random state and this process has no GPU; load with State(rng=False)"
            )
        torch.cuda.set_rng_state(state["cuda"])
