"""FSDP2 over all ranks, and parameters that come to life shard by shard.

The model is built on the meta device, split, and only then given memory: no rank ever holds all of it. `fill` writes
each rank's own rows, from a source that can produce any run of rows of any parameter, so the values do not depend on
the number of ranks. A source is either the seed (`seeded`) or files (`hf.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ridethrough.train.model import Llama

Rows: TypeAlias = Callable[[str, torch.Size, int, int], Tensor]
"""(parameter name, full shape, first row, number of rows) -> those rows, on any device and in any dtype."""


def shard(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Split every block, and the rest as the root, by rows over the mesh, in place. Collective: all ranks of the mesh.

    Computation runs in `dtype`; the shards and the reduction of gradients stay float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reshard(model: Llama) -> None:
    """Free the full parameters that a forward without backward leaves in the root, so that shards are seen again."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's memory of a parameter and the number of its first row in the full one (0, if not sharded).

    FSDP2 splits dimension 0 as `torch.chunk` does: runs of ceil(rows / ranks), the last ones shorter or empty.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    ranks, coordinate = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    run = -(-parameter.shape[0] // ranks)
    return parameter.to_local(), min(coordinate * run, parameter.shape[0])


@torch.no_grad()
def fill(model: nn.Module, rows: Rows) -> None:
    """Write every parameter of this rank from `rows`. No collective; at most one parameter's shard is held twice."""
    for name, parameter in model.named_parameters():
        local, first = local_rows(parameter)
        if len(local):
            local.copy_(rows(name, parameter.shape, first, len(local)))


def seeded(seed: int, num_layers: int) -> Rows:
    """Initial weights as a pure function of seed, parameter name and row.

    Normal with standard deviation 0.02, the projections that write to the residual stream divided by
    sqrt(2 * num_layers) (Radford et al. 2019, section 2.3); norms are one. Each row has a counter of its own in one
    Philox stream per name, so any run of rows can be drawn alone.
    """

    def rows(name: str, shape: torch.Size, first: int, count: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(count)
        key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], dtype=np.uint64)
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = 0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02
        out = np.empty((count, *shape[1:]), dtype=np.float32)
        for i in range(count):
            stream = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, first + i]))
            stream.standard_normal(dtype=np.float32, out=out[i])
        return torch.from_numpy(out).mul_(deviation)

    return rows
