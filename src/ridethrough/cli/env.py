"""`ridethrough env`: what a bug report needs to say about versions and machine."""

from __future__ import annotations

from typing import Any

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.table import print_table

app = App()


@app.command()
def env(json: JsonOption = None) -> None:
    """Versions, machine, limits and GPUs, to paste into a bug report. Imports no torch and starts nothing heavy.

    Example:

        ridethrough env --json env.json
    """
    from ridethrough.report.environment import environment

    found = environment()
    if json is not None:
        write_json(found, json)
        return
    rows = [[f"{group}.{name}", _shown(value)] for group, values in found.items() for name, value in values.items()]
    print_table(["what", "value"], rows)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value) or "none"
    return "-" if value is None else str(value)
