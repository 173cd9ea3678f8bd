"""First weights out of a Hugging Face Llama folder. Each rank reads only its own rows of each tensor.

Needs the extra `hf` (safetensors).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridethrough.train.hf_config import stored_name, weight_files
from ridethrough.train.sharding import Rows


def pretrained(folder: str) -> Rows:
    """Rows out of the files, read on demand: pass it to `sharding.fill`. Any stored dtype; raises WeightsError.

    `hf_config.check_weights` has seen to it that they are there and have their shapes.
    """
    from safetensors import safe_open

    files = {}
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), path))

    def rows(name: str, shape: torch.Size, first: int, count: int) -> Tensor:
        stored = stored_name(name)
        with safe_open(str(files[stored]), framework="pt") as tensors:
            out: Tensor = tensors.get_slice(stored)[first : first + count]
            return out

    return rows
