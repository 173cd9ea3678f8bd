"""`ridethrough status`: what a run is doing now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.run_argument import RunOrLatest, Runs, find
from ridethrough.cli.usage import usage_errors
from ridethrough.ledger.rundir import RunDirError

if TYPE_CHECKING:
    from ridethrough.report.status import Status

app = App()


@app.command()
def status(
    run: RunOrLatest = "latest",
    runs: Runs = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until the run ends.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, metavar="SECONDS", help="How often to look.")] = 2.0,
    json: JsonOption = None,
) -> None:
    """Step, loss, goodputs, checkpoint freshness, restart causes, the open incident, and what each rank does.

    Reads the run's events; it does not talk to the job, so it can't disturb it.

    Examples:

        ridethrough status --watch
        ridethrough status my-run --json
    """
    path = find(runs, run)
    if json is not None or not watch:
        now = _read(path)
        if json is not None:
            write_json(now.as_json(), json)
        else:
            _print(Console(highlight=False), now)
        return
    _watch(path, every)


def _read(path: Path) -> Status:
    from ridethrough.ledger.reading import LedgerError
    from ridethrough.report.status import read_status

    with usage_errors(RunDirError, LedgerError):
        return read_status(path)


def _watch(path: Path, every: float) -> None:
    from rich.live import Live

    from ridethrough.report.status_text import status_view

    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                begun = time.monotonic()
                now = _read(path)
                live.update(status_view(now, rows=max(4, console.height - 16)), refresh=True)
                if now.state in ("ended", "died"):
                    return
                time.sleep(max(every, 4 * (time.monotonic() - begun)))  # a large run takes a while to read
    except KeyboardInterrupt:
        return


def _print(console: Console, now: Status) -> None:
    from ridethrough.report.status_text import status_view

    console.print(status_view(now))
