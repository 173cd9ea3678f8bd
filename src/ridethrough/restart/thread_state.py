"""Thread-wide modes of torch that an interrupt may leave switched: read before, compared after."""

from __future__ import annotations

import torch


def modes() -> dict[str, object]:
    """Everything that a `with` of torch switches for the thread, and the process-wide defaults. Main thread."""
    found: dict[str, object] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "saved tensors hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
        "multithreaded backward": torch._C._is_multithreading_enabled(),
    }
    for device in ("cpu", "cuda"):
        found[f"autocast {device}"] = torch.is_autocast_enabled(device)
    return found


def difference(before: dict[str, object], after: dict[str, object]) -> str:
    """What differs, for people: `grad is False (was True)`; empty if nothing does."""
    return ", ".join(f"{name} is {after[name]} (was {before[name]})" for name in before if before[name] != after[name])
