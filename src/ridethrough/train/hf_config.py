"""What a Hugging Face Llama folder says about itself: the shapes in `config.json` and the files of the weights.

No torch here: the command line checks the folder before any rank starts.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridethrough.train.presets import ModelConfig, RopeScaling

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightsError(ValueError):
    """The folder does not hold a Llama that this job can start from. The message says what to do."""


def read_config(folder: str) -> ModelConfig:
    """Shapes of the model in `folder`. Reads `config.json` only; raises WeightsError if it is no Llama's."""
    path = Path(folder) / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightsError(f"--init-from {folder}: no config.json; give the folder of a Hugging Face Llama") from None
    except ValueError as e:
        raise WeightsError(f"{path} is not JSON ({e}); download the model again") from None
    if raw.get("model_type") != "llama":
        raise WeightsError(f"{path}: model_type is {raw.get('model_type')!r}; only 'llama' can be loaded")
    for unsupported in ("attention_bias", "mlp_bias"):
        if raw.get(unsupported):
            raise WeightsError(f"{path}: {unsupported} is not supported; give a Llama without biases")
    try:
        # transformers 5 writes rope_parameters, earlier versions rope_theta beside rope_scaling
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            ffn_size=raw["intermediate_size"],
            max_seq_len=raw["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope, path),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied_head=raw.get("tie_word_embeddings", False),
        )
    except KeyError as e:
        raise WeightsError(f"{path}: {e} is missing; download the model again") from None


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise WeightsError(f"{path}: rope scaling {kind!r} is not supported; 'llama3' and none are")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def weight_files(folder: str) -> list[Path]:
    """The safetensors files of the model, in the order of their names. WeightsError names one that is missing."""
    root = Path(folder)
    if (root / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((root / _INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError) as e:
            raise WeightsError(f"{root / _INDEX} is no index ({e!r}); download the model again") from None
    else:
        names = [_ONE_FILE]
    for name in names:
        if not (root / name).is_file():
            raise WeightsError(f"--init-from {folder}: {name} is missing; give a folder with all its safetensors")
    return [root / name for name in names]


def stored_name(name: str) -> str:
    """What a Hugging Face Llama calls the parameter that is `name` in ours."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def check_weights(folder: str, model: ModelConfig) -> None:
    """Reads the headers of the files. WeightsError if they cannot be read here (the extra `hf` is not installed), or
    lack a tensor of `model`, or hold it in another shape."""
    paths = weight_files(folder)
    if find_spec("safetensors") is None:
        raise WeightsError("--init-from needs safetensors: pip install 'ridethrough[hf]'")
    from safetensors import SafetensorError, safe_open

    stored = {}
    for path in paths:
        try:
            with safe_open(str(path), framework="numpy") as tensors:
                stored.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise WeightsError(f"{path} cannot be read ({e}); download it again") from None
    for name, shape in model.shapes().items():
        found = stored.get(stored_name(name))
        if found != shape:
            is_there = f"{stored_name(name)} is {list(found)}" if found else f"there is no tensor {stored_name(name)}"
            raise WeightsError(
                f"--init-from {folder}: {is_there}, its config.json and --num-layers ask for {list(shape)}; "
                "give a Llama whose files belong together"
            )
