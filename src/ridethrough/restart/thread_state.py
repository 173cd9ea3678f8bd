"""Thread-wide modes of torch that an interrupt may leave switched: read before, compared after."""

from __future__ import annotations

import torch


def modes() -> tuple[object, ...]:
    """Grad, inference and autocast modes, default dtype and the depth of the mode stacks. Main thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )
