"""Llama in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameters carry the names that Hugging Face's Llama gives them (without the leading `model.`), so published weights
load without a translation table. Nothing here knows of ranks: `sharding.py` spreads the model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridethrough.train.presets import ModelConfig


def rope_frequencies(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Rotation speed of each pair of channels, radians per position: float32 [head_dim / 2].

    Llama 3.1's scaling: wavelengths shorter than original_context / high_freq_factor stay, those longer than
    original_context / low_freq_factor are stretched by `factor`, and between them the two are blended linearly in
    original_context / wavelength.
    """
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freq = 1.0 / config.rope_theta ** (channel / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_context * freq / (2 * math.pi)  # in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [batch, heads, seq, head_dim] by its position; channel i is paired with i + head_dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention in which num_heads queries share num_kv_heads keys and values."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.head_dim, self.dropout = hd, dropout
        self.groups = config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(d, config.num_heads * hd, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_heads * hd, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [batch, seq, n * head_dim] -> [batch, n, seq, head_dim]
            return y.view(batch, seq, -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, dropout)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not (self.recompute and self.training):
            return self.body(x, cos, sin)
        # Keep only the block's input, compute the rest again in backward.
        out: Tensor = checkpoint(self.body, x, cos, sin, use_reentrant=False)
        return out

    def body(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.residual_dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.residual_dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Llama(nn.Module):
    """Token ids int64 [batch, seq] -> logits [batch, seq, vocab_size].

    `dropout` is off in the published model and 0 by default. `recompute` trades memory for a second forward of each
    block. A tied head has no module of its own: it reads the embedding, so sharding and loading see one parameter.
    """

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, dropout, recompute) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        # The angles are computed in float32 and rounded once, like the published model's.
        position = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angle = torch.outer(position, rope_frequencies(self.config, tokens.device))  # [seq, head_dim / 2]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        head = self.embed_tokens.weight if self.config.tied_head else self.lm_head.weight
        return F.linear(x, head)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, in float32. targets: int64 [batch, seq]."""
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
