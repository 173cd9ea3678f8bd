"""Plots of the benchmarks page: bars of text, which every viewer shows and a diff can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_WIDTH = 40


def bars(title: str, values: Mapping[str, float], unit: str) -> Iterator[str]:
    """A block of one bar per name, longest for the largest value; nothing without values."""
    if not values:
        return
    largest = max(values.values()) or 1.0
    widest = max(len(name) for name in values)
    yield "```text"
    yield title
    for name, value in values.items():
        bar = "#" * max(1, round(_WIDTH * value / largest))
        yield f"{name:<{widest}} {bar} {value:.3g} {unit}".rstrip()
    yield "```\n"
