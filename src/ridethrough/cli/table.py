"""Plain tables on standard output: aligned, readable without colour, no box."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; long cells wrap to the terminal's width. Where it is none, nothing is wrapped."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 1000
    Console(highlight=False, markup=False, width=width).print(table)


def print_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned lines, whole whatever the terminal's width: one line per row, to read and to grep."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
