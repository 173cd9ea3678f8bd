"""One hash over everything that training has made: equal hashes mean equal bits on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """xxh3-128 of all parameters and their optimizer state, the same on every rank: 32 hex digits.

    Each rank hashes its own shards in the order of names (name, dtype, shape, raw bytes), and the ranks' digests are
    hashed in rank order: the value belongs to a world size. Collective (one all-gather of 16 bytes); main thread.
    """
    own = xxhash.xxh3_128()
    for name, parameter in sorted(model.named_parameters()):
        _add(own, name, parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            _add(own, f"{name}/{key}", torch.as_tensor(value))
    if not dist.is_initialized():
        return xxhash.xxh3_128_hexdigest(own.digest())
    device = next(model.parameters()).device
    mine = torch.frombuffer(bytearray(own.digest()), dtype=torch.uint8).to(device)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    return xxhash.xxh3_128_hexdigest(b"".join(bytes(d.cpu().numpy()) for d in digests))


def _add(hasher: xxhash.xxh3_128, label: str, tensor: Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().cpu().contiguous()
    hasher.update(f"{label} {local.dtype} {tuple(local.shape)}\n".encode())
    hasher.update(local.reshape(-1).view(torch.uint8).numpy().data)
