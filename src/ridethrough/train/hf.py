"""First weights out of a Hugging Face Llama folder. Each rank reads only its own rows of each tensor.

Needs the extra `hf` (safetensors).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridethrough.train.hf_config import WeightsError, check_weights, weight_files
from ridethrough.train.sharding import Rows


def pretrained(folder: str) -> Rows:
    """Rows out of the files, read on demand: pass it to `sharding.fill`. Any stored dtype; raises WeightsError."""
    check_weights(folder)
    from safetensors import safe_open

    files = {}
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), path))

    def rows(name: str, shape: torch.Size, first: int, count: int) -> Tensor:
        stored = name if name.startswith("lm_head.") else f"model.{name}"
        if stored not in files:
            raise WeightsError(f"--init-from {folder}: no tensor {stored}; it is not a Llama of this shape")
        with safe_open(str(files[stored]), framework="pt") as tensors:
            part = tensors.get_slice(stored)
            if list(part.get_shape()) != list(shape):
                raise WeightsError(f"{files[stored]}: {stored} is {part.get_shape()}, expected {list(shape)}")
            out: Tensor = part[first : first + count]
            return out

    return rows
