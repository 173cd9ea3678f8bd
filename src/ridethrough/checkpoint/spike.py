"""When a loss is so far off that the state behind it should not replace a good one."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 32
LEAST = 8  # losses to have seen before one is judged


class LossSpike:
    """A loss is a spike if it is not finite, or more than `factor` times the median of the last WINDOW ones. Where it
    stays up it is the new level after half a window. For losses above 0."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        typical = statistics.median(self._seen) if len(self._seen) >= LEAST else math.inf
        self._seen.append(loss)
        return loss > self.factor * typical
