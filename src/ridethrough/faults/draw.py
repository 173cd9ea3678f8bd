"""Seeded draws that are the same on every machine and every Python.

Each draw hashes the seed with a label, so a draw depends on nothing but its own label: adding a field to a fault
does not shift the others. (`random.Random` promises stable streams for `random()` only.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_DOMAIN = "ridethrough-faults-1"


class Draw:
    """Draws for one seed. Pure; usable from any thread."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _bits(self, label: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{_DOMAIN}/{self.seed}/{label}".encode()).digest()[:16], "big")

    def unit(self, label: str) -> float:
        """A float in [0, 1)."""
        return (self._bits(label) >> 75) / (1 << 53)

    def below(self, bound: int, label: str) -> int:
        """An int in [0, bound). The bias of the modulo is below 2**-64."""
        return self._bits(label) % bound

    def choice(self, options: Sequence[T], label: str) -> T:
        """One of `options`, each equally likely."""
        return options[self.below(len(options), label)]

    def weighted(self, options: Sequence[T], weights: Sequence[float], label: str) -> T:
        """One of `options` by weight; an option of weight 0 is never drawn."""
        point = self.unit(label) * sum(weights)
        last = options[0]
        for option, weight in zip(options, weights, strict=True):
            if weight > 0:
                if point < weight:
                    return option
                point -= weight
                last = option
        return last  # rounding left the point just above the sum

    def distinct(self, low: int, high: int, count: int, label: str) -> list[int]:
        """`count` different ints of low..high (both included), in drawn order: a sparse Fisher-Yates shuffle."""
        size = high - low + 1
        moved: dict[int, int] = {}
        out = []
        for i in range(count):
            j = i + self.below(size - i, f"{label}/{i}")
            out.append(low + moved.get(j, j))
            moved[j] = moved.get(i, i)
        return out
