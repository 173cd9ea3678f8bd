"""Plots of the benchmarks page: bars as SVG, one file each, readable on a light and on a dark page and in a diff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _TOP, _BOTTOM = 760, 24, 40, 34
_LETTER = 7.6  # width of one at 13 px, in the widest of the usual fonts
_LOG_FROM = 20.0  # largest over smallest: from here on a linear axis would hide the small ones

_STYLE = """
text{font:13px system-ui,sans-serif;fill:#1c1c1c}.t{font-weight:600}.a{fill:#666;font-size:11px}
.p{fill:#fff;stroke:#ddd}.g{stroke:#e4e4e4}.o{fill:#2f855a}.r{fill:#9aa7b4}.w{stroke:#1c1c1c;stroke-width:1.5}
@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.a{fill:#9aa0a6}.p{fill:#15181b;stroke:#33383d}
.g{stroke:#2a2f34}.o{fill:#4fae79}.r{fill:#5d6b78}.w{stroke:#e6e6e6}}
"""


@dataclass(frozen=True)
class Bar:
    """One row. `high`: the longest of the measured ones, drawn as a whisker; `ours` is coloured."""

    name: str
    value: float
    high: float | None = None
    ours: bool = False


def bars(title: str, rows: Sequence[Bar], unit: str, top: float | None = None) -> str:
    """A file with one bar per row, in their order. The axis ends at `top`, else above the largest; it is logarithmic
    where the values differ by more than twenty times, and says so."""
    values = [value for row in rows for value in (row.value, row.high) if value is not None and value > 0]
    largest = top or max(values, default=1.0)
    smallest = min(values, default=largest)
    scale = _Log(smallest, largest) if largest / smallest > _LOG_FROM else _Linear(largest)
    left = 20 + _LETTER * max((len(row.name) for row in rows), default=0)
    right, bottom = _WIDTH - 90, _TOP + _ROW * len(rows)

    def x(value: float) -> float:
        return left + (right - left) * scale.place(value)

    out = [f'<text class="t" x="14" y="24">{escape(title)}{escape(scale.said)}</text>']
    for tick in scale.ticks:
        out.append(f'<line class="g" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP - 4}" y2="{bottom + 2}"/>')
        shown = f"{tick:g} {unit}".rstrip()
        out.append(f'<text class="a" x="{x(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{escape(shown)}</text>')
    for place, row in enumerate(rows):
        y, end = _TOP + _ROW * place, x(row.value)
        colour = "o" if row.ours else "r"
        out.append(f'<text x="{left - 8:.1f}" y="{y + 15}" text-anchor="end">{escape(row.name)}</text>')
        out.append(
            f'<rect class="{colour}" x="{left:.1f}" y="{y + 3}" width="{max(end - left, 1):.1f}" height="15" rx="2"/>'
        )
        tip = end
        if row.high is not None and row.high > row.value:
            tip = x(row.high)
            out.append(f'<line class="w" x1="{end:.1f}" x2="{tip:.1f}" y1="{y + 10.5}" y2="{y + 10.5}"/>')
            out.append(f'<line class="w" x1="{tip:.1f}" x2="{tip:.1f}" y1="{y + 6}" y2="{y + 15}"/>')
        shown = f"{row.value:.3g} {unit}".rstrip()
        out.append(f'<text x="{tip + 7:.1f}" y="{y + 15}">{escape(shown)}</text>')
    height = bottom + _BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    panel = f'<rect class="p" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", panel, *out, "</svg>"]) + "\n"
    )


class _Linear:
    said = ""

    def __init__(self, largest: float) -> None:
        step = _nice(largest / 5)
        self._end = max(step * math.ceil(largest / step - 1e-9), step)
        self.ticks = [step * n for n in range(round(self._end / step) + 1)]

    def place(self, value: float) -> float:
        return value / self._end


class _Log:
    said = " (logarithmic)"

    def __init__(self, smallest: float, largest: float) -> None:
        first = math.floor(math.log10(smallest))
        last = max(math.ceil(math.log10(largest)), first + 1)
        self._first, self._decades = first, last - first
        self.ticks = [10.0**power for power in range(first, last + 1)]

    def place(self, value: float) -> float:
        return max(0.0, (math.log10(value) - self._first) / self._decades) if value > 0 else 0.0


def _nice(value: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999)
