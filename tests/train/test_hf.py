"""First weights out of a Hugging Face folder that is saved here, in several safetensors files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridethrough.train.config import ConfigError, TrainConfig, check
from ridethrough.train.hf import pretrained
from ridethrough.train.hf_config import WeightsError, read_config, weight_files
from ridethrough.train.model import Llama
from ridethrough.train.presets import PRESETS, RopeScaling
from ridethrough.train.sharding import fill

transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'ridethrough[hf]'")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        )
    ).eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder, model


def test_shapes_come_from_the_folder(saved: tuple[Path, Any]) -> None:
    config = read_config(str(saved[0]))
    assert (config.hidden_size, config.num_layers, config.head_dim, config.tied_head) == (64, 2, 16, False)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 128)


def test_logits_are_those_of_the_saved_model(saved: tuple[Path, Any]) -> None:
    folder, theirs = saved
    assert len(weight_files(str(folder))) > 1
    ours = Llama(read_config(str(folder))).eval()
    fill(ours, pretrained(str(folder)))
    tokens = torch.randint(256, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max().item() < 1e-4


def test_only_the_rows_asked_for_are_read(saved: tuple[Path, Any]) -> None:
    folder, theirs = saved
    rows = pretrained(str(folder))("layers.1.mlp.up_proj.weight", torch.Size([96, 64]), 24, 24)
    assert torch.equal(rows, theirs.model.layers[1].mlp.up_proj.weight[24:48])


def test_a_preset_of_another_shape_is_refused(saved: tuple[Path, Any]) -> None:
    folder = str(saved[0])
    check(TrainConfig(init_from=folder), 2)
    with pytest.raises(
        ConfigError, match=r"--preset tiny has hidden_size 192, --init-from .* has 64; leave --preset out"
    ):
        check(TrainConfig(init_from=folder, preset="tiny"), 2)
    with pytest.raises(ConfigError, match=r"--num-layers 3: .* has 2; give no more"):
        check(TrainConfig(init_from=folder, num_layers=3), 2)


def test_a_missing_file_is_named(saved: tuple[Path, Any], tmp_path: Path) -> None:
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    gone = weight_files(str(tmp_path))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=f"{gone.name} is missing"):
        check(TrainConfig(init_from=str(tmp_path)), 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(WeightsError, match="model_type is 'gpt2'; only 'llama' can be loaded"):
        read_config(str(tmp_path))


def test_weights_of_another_shape_than_the_config_are_refused_before_a_rank_starts(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate_proj.weight is \[96, 64\], .* ask for \[128, 64\]"):
        check(TrainConfig(init_from=str(tmp_path)), 1)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"there is no tensor model.layers.2.input_layernorm.weight"):
        check(TrainConfig(init_from=str(tmp_path)), 1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    damaged = weight_files(str(tmp_path))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"{damaged.name} cannot be read .*; download it again"):
        check(TrainConfig(init_from=str(tmp_path)), 1)


def test_the_published_config_gives_the_preset(tmp_path: Path) -> None:
    """Fields of meta-llama/Llama-3.2-1B's config.json that fix the shape, as transformers 4 wrote them."""
    published = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert read_config(str(tmp_path)) == PRESETS["1b"]
    assert dataclasses.replace(PRESETS["1b"], num_layers=1) != PRESETS["1b"]
