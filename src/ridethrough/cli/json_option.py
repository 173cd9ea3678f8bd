"""`--json [FILE]`: the same option, with an optional file, for every command that prints a table.

    @app.command()
    def show(json: JsonOption = None) -> None:
        if json is not None:
            write_json(value, json)

Without a file the JSON is the only thing on standard output. `--json FILE` and `--json=FILE` both work; a bare `--json`
goes last or before another option, since a word after it is its file.
"""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.usage import fail

STANDARD_OUTPUT = "-"

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="Write JSON to FILE, or to standard output without a file."),
]


def with_json_value(args: list[str]) -> list[str]:
    """Give a bare `--json` the value "-"; leaves everything from `--` on alone."""
    out: list[str] = []
    for index, arg in enumerate(args):
        if arg == "--":
            return out + args[index:]
        following = args[index + 1] if index + 1 < len(args) else "--"
        bare = arg == "--json" and following.startswith("-") and following != STANDARD_OUTPUT
        out.append(f"--json={STANDARD_OUTPUT}" if bare else arg)
    return out


def check_json_target(target: str) -> None:
    """Exits with code 2 if `write_json` could not write there; for commands that take long."""
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        fail(f"--json {target}: give a file in a folder that exists and can be written")


def write_json(value: Any, target: str) -> None:
    """Print `value` as JSON, or write it to the file `target`. Exits with code 2 if that cannot be written."""
    text = json_format.dumps(value, indent=1) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--json {target}: {error.strerror}; give a file in a folder that exists and can be written")
