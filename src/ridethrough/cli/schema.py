"""`ridethrough schema`: the ledger's events as JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.table import print_table

app = App()


@app.command()
def schema(
    json: JsonOption = None,
    table: Annotated[bool, typer.Option("--table", help="A table of kinds to read, instead of JSON Schema.")] = False,
) -> None:
    """Print the JSON Schema of one line of a run's `events/*.jsonl`: every kind, who writes it, its fields.

    Example:

        ridethrough schema --json events.schema.json
    """
    from ridethrough.ledger.schema import KINDS, json_schema

    if json is not None or not table:
        write_json(json_schema(), json or STANDARD_OUTPUT)
        return
    rows = [[name, ", ".join(kind.roles), kind.doc, ", ".join(kind.fields)] for name, kind in KINDS.items()]
    print_table(["kind", "written by", "when", "fields"], rows)
