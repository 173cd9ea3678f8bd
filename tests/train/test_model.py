"""The model's shapes and numbers against the published ones and against Hugging Face's code."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ridethrough.train.model import Llama, rope_frequencies
from ridethrough.train.presets import PRESETS, ModelConfig, RopeScaling
from ridethrough.train.sharding import fill, seeded

SMALL = ModelConfig(
    vocab_size=96, hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, ffn_size=80, max_seq_len=512
)


def on_meta(preset: str) -> Llama:
    with torch.device("meta"):
        return Llama(PRESETS[preset])


@pytest.mark.parametrize(
    ("preset", "count"),
    [("tiny", 984_000), ("small", 15_047_040), ("1b", 1_235_814_400), ("llama3.1-8b", 8_030_261_248)],
)
def test_parameter_counts_equal_the_published_ones(preset: str, count: int) -> None:
    model = on_meta(preset)
    assert sum(p.numel() for p in model.parameters()) == count
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == PRESETS[preset].shapes()
    assert PRESETS[preset].num_parameters() == count


def test_shapes_of_llama_3_1_8b() -> None:
    shapes = {name: tuple(p.shape) for name, p in on_meta("llama3.1-8b").named_parameters()}
    assert shapes["embed_tokens.weight"] == shapes["lm_head.weight"] == (128_256, 4096)
    assert shapes["layers.31.self_attn.q_proj.weight"] == (4096, 4096)
    assert shapes["layers.31.self_attn.k_proj.weight"] == shapes["layers.31.self_attn.v_proj.weight"] == (1024, 4096)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (4096, 4096)
    assert shapes["layers.0.mlp.gate_proj.weight"] == shapes["layers.0.mlp.up_proj.weight"] == (14_336, 4096)
    assert shapes["layers.0.mlp.down_proj.weight"] == (4096, 14_336)
    assert len(shapes) == 32 * 9 + 3


def test_tied_head_is_no_parameter_of_its_own() -> None:
    assert "lm_head.weight" not in dict(on_meta("1b").named_parameters())


def test_rope_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    config = PRESETS["llama3.1-8b"]
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    scaled = rope_frequencies(config)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert torch.equal(scaled[short], plain[short])
    assert torch.allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.sum() > 0
    assert bool(((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all())


def test_a_later_token_changes_no_earlier_logit() -> None:
    model = Llama(SMALL)
    fill(model, seeded(0, SMALL.num_layers))
    tokens = torch.arange(20).view(1, 20)
    changed = tokens.clone()
    changed[0, 10] = 77
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.equal(a[:, 10:], b[:, 10:])


def test_recomputing_activations_changes_no_gradient() -> None:
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        model = Llama(SMALL, dropout=0.2, recompute=recompute)
        fill(model, seeded(0, SMALL.num_layers))
        torch.manual_seed(5)
        model.loss(model(tokens), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0, original_context=64)])
def test_logits_equal_hugging_faces(tied: bool, scaling: RopeScaling | None) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'ridethrough[hf]'")
    config = dataclasses.replace(SMALL, tied_head=tied, rope_scaling=scaling)
    rope = {"rope_type": "default"}
    if scaling:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            rope_scaling=rope if scaling else None,
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():  # weights far from the near-zero initial ones, so that every path counts
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    ours = Llama(config).eval()
    weights = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    if tied:
        weights.pop("lm_head.weight")
    ours.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max().item()
    assert difference < 1e-4
