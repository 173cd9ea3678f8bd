"""`ridethrough exit-codes`: what the exit status of a job says."""

from __future__ import annotations

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.table import print_table
from ridethrough.generation.exit_codes import EXIT_CODES

app = App()


@app.command()
def exit_codes(json: JsonOption = None) -> None:
    """Exit codes of run, demo and train, and whether an orchestrator should try again.

    With --max-restarts 0 a worker's own code, or 128 + n for a signal, is passed on instead.

    Example:

        ridethrough exit-codes --json
    """
    if json is not None:
        rows = [{"code": r.code, "name": r.name, "meaning": r.meaning, "retry": r.retry} for r in EXIT_CODES]
        write_json(rows, json)
        return
    print_table(["code", "meaning", "retry"], [[r.code, r.meaning, r.retry] for r in EXIT_CODES])
