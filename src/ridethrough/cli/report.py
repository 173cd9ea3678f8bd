"""`ridethrough report`: write a run's HTML report anew."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.run_argument import RunOrLatest, Runs, find
from ridethrough.cli.usage import fail, usage_errors
from ridethrough.ledger.rundir import RunDirError

app = App()


@app.command()
def report(
    run: RunOrLatest = "latest",
    runs: Runs = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Where to write it; else report.html in the run.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without plotly, even where it is installed: small, no script at all.")
    ] = False,
    gpu_hour_price: Annotated[
        float | None, typer.Option("--gpu-hour-price", min=0, metavar="MONEY", help="Of one GPU; a rank counts as one.")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="RUN", help="The undisturbed run whose final state this one must equal."),
    ] = None,
) -> None:
    """Write one self-contained HTML file: timeline, steps, recovery, where the time went, what to change.

    It refers to nothing outside of itself. With the extra `report` (plotly) the figures can be zoomed and hovered;
    without it they are plain SVG.

    Example:

        ridethrough report my-run --to report.html
    """
    from ridethrough.ledger.reading import LedgerError
    from ridethrough.ledger.summary import ledger_summary, read_run
    from ridethrough.report.html import write_report

    path = find(runs, run)
    begun = time.monotonic()
    with usage_errors(RunDirError, LedgerError):
        try:
            final = ledger_summary(read_run(find(runs, control)))["final_hash"] if control is not None else None
            written = write_report(path, control_hash=final, to=to, plain=plain, gpu_hour_price=gpu_hour_price)
        except OSError as error:
            fail(f"{error.filename or path}: {error.strerror}; give a file that can be written with --to FILE")
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB, {time.monotonic() - begun:.1f} s)")
