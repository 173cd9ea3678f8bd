"""`ridethrough schema`: the ledger's events as JSON Schema."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ridethrough.cli.table import print_table

app = typer.Typer(rich_markup_mode="markdown")


@app.command()
def schema(
    table: Annotated[bool, typer.Option("--table", help="A table of kinds to read, instead of JSON Schema.")] = False,
) -> None:
    """Print the JSON Schema of one line of a run's `events/*.jsonl`: every kind, who writes it, its fields."""
    from ridethrough.ledger.schema import KINDS, json_schema

    if not table:
        sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
        return
    rows = [[name, ", ".join(kind.roles), kind.doc, ", ".join(kind.fields)] for name, kind in KINDS.items()]
    print_table(["kind", "written by", "when", "fields"], rows)
