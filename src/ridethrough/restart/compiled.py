"""Compiled code keeps the old generation's groups and graphs: reset it where something was compiled."""

from __future__ import annotations

import sys
from typing import Any


def forget_compiled() -> bool:
    """Resets dynamo and the CUDA graph trees if this process has compiled something; True if it has. Main thread."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    utils: Any = sys.modules.get("torch._dynamo.utils")
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if dynamo is None or utils is None or not utils.counters:
        return False
    dynamo.reset()
    utils.counters.clear()
    if trees is not None:
        trees.reset_cudagraph_trees()
    return True
