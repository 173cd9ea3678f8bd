"""Is it still what it was? Comparisons that tell whether a snapshot is of the step that it says.

Marks are small samples taken at the boundary itself: if live tensors and copies both still match them,
nothing has stepped in between.
"""

from __future__ import annotations

from typing import Any

import torch

from ridethrough.checkpoint.arena import Arena
from ridethrough.checkpoint.copier import target_view
from ridethrough.checkpoint.plan import Placed, Plan

SAMPLE_ELEMENTS = 64
NUM_MARKS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUM_MARKS_LATER = 2  # once whole comparisons have shown that fences work


def telling(plan: Plan, num_compared: int = 0) -> list[Placed]:
    """A few fenced tensors that no optimizer step leaves as they are: step counters and some of the others."""
    if num_compared > 1 and plan.telling:
        return plan.telling
    num_marks = NUM_MARKS_LATER if num_compared > 1 else NUM_MARKS
    fenced = [item for item in plan.placed if item.fenced]
    small = [item for item in fenced if item.local.numel() == 1]
    large = [item for item in fenced if item.local.numel() > 1]
    found = [item for items in (small, large) for item in items[:: max(1, len(items) // num_marks)][: num_marks + 1]]
    plan.telling = found if num_compared > 1 else []
    return found


def untouched(arena: Arena, marks: list[tuple[Placed, torch.Tensor]]) -> bool:
    """Whether nothing has stepped since the boundary: live tensors and their copies both are as the marks
    say."""
    with torch.no_grad():
        return all(
            torch.equal(sample(item.local), mark)
            and torch.equal(mark, sample(target_view(arena, item)).to(mark.device))
            for item, mark in marks
        )


def equal(plan: Plan, arena: Arena) -> bool:
    """Whether the fenced tensors are, byte for byte, what was copied."""
    with torch.no_grad():
        return all(_same_bits(item.local, target_view(arena, item)) for item in plan.placed if item.fenced)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its elements, as integers: a NaN is not equal to itself."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)].view(_INTEGERS[flat.element_size()])


def _same_bits(live: torch.Tensor, copied: torch.Tensor) -> bool:
    return torch.equal(_bits(live), _bits(copied.to(live.device)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, eight bytes each where that goes: comparing them is several times as fast."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    wide = flat.numel() % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if wide else flat


def same_value(a: Any, b: Any) -> bool:
    """Equal for plain values; anything that holds tensors or arrays is taken as changed."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, str, bytes, type(None))):
        return a == b and str(a) == str(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    return False
