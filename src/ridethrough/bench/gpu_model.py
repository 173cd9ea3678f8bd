"""A transformer for the benchmarks on GPUs: wrapped as a job would wrap it, with batches that a step and rank decide.

Needs torch alone, so that a peer's environment can run it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY = 16384


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.heads = dim // 64

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


def build(
    device: torch.device,
    *,
    dim: int = 1536,
    layers: int = 12,
    wrap: str = "fsdp2",
    masters: bool = False,
    compiled: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer; the process group is there. `masters`: float32 parameters and optimizer state (12 bytes a
    parameter) that compute in bfloat16; else everything is bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = Model(dim, layers)
    if not masters:
        model.to(torch.bfloat16)
    if compiled:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    else:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if masters else MixedPrecisionPolicy()
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=precision)
        fully_shard(model, mp_policy=precision)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch(step: int, rank: int, device: torch.device, sequences: int = 2, length: int = 512) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (sequences, length) each."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randint(0, VOCABULARY, (sequences, length + 1), generator=generator).to(device)
    return x[:, :-1], x[:, 1:]
