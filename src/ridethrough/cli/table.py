"""Plain tables on standard output: aligned, readable without colour, no box."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; long cells wrap to the terminal's width."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
