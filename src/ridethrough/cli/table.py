"""Plain tables on standard output: aligned, readable without colour, no box."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], whole: Sequence[int] = ()) -> None:
    """Print rows under a header; long cells wrap to the terminal's width, but those of the columns `whole` never do."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(header):
        widest = max([len(row[place]) for row in rows], default=0) if place in whole else None
        table.add_column(name, min_width=widest, no_wrap=place in whole)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
