"""Shapes of the models that the reference job trains. No torch here: the command line reads this file.

The two large presets are the published Llama shapes; their parameter counts are checked on the meta device in
`tests/train/test_model.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies to a longer context (see `model.rope_frequencies`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shape of a Llama. Sizes are counts of elements, never bytes."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_head: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by the name that `model.Llama` gives it (a tied head is the embedding)."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        block: dict[str, tuple[int, ...]] = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (self.ffn_size, d),
            "mlp.up_proj": (self.ffn_size, d),
            "mlp.down_proj": (d, self.ffn_size),
        }
        shapes = {"embed_tokens": (self.vocab_size, d), "norm": (d,)}
        shapes |= {f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in block.items()}
        if not self.tied_head:
            shapes["lm_head"] = (self.vocab_size, d)
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def num_parameters(self) -> int:
        """Count of trainable scalars (a tied head counts once)."""
        return sum(math.prod(shape) for shape in self.shapes().values())


BYTE_VOCAB = 256  # a byte is a token; byte 0, which text does not hold, ends a document

PRESETS: dict[str, ModelConfig] = {
    # 984,000 parameters. Few blocks, since each costs collectives: four ranks on two cores take 0.1 to 0.2 s a step.
    "tiny": ModelConfig(
        vocab_size=BYTE_VOCAB,
        hidden_size=192,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=640,
        max_seq_len=2048,
        rope_theta=10_000.0,
        tied_head=True,
    ),
    # 15,047,040 parameters.
    "small": ModelConfig(
        vocab_size=BYTE_VOCAB,
        hidden_size=384,
        num_layers=8,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=1280,
        max_seq_len=4096,
        rope_theta=10_000.0,
        tied_head=True,
    ),
    # Llama-3.2-1B: 1,235,814,400 parameters.
    "1b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tied_head=True,
    ),
    # Llama-3.1-8B: 8,030,261,248 parameters.
    "llama3.1-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14_336,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
}

LEARNING_RATES = {"tiny": 3e-3, "small": 1e-3, "1b": 3e-4, "llama3.1-8b": 3e-4}
"""Highest rate of each preset, if the user gives none."""
