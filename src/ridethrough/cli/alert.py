"""`ridethrough alert`: watch a run and tell what happens to it, on standard output and to a webhook."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.run_argument import RunOrLatest, Runs, find
from ridethrough.cli.usage import usage_errors

app = App()


@app.command()
def alert(
    run: RunOrLatest = "latest",
    runs: Runs = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook", metavar="URL", envvar="RIDETHROUGH_WEBHOOK", help="Each alert is POSTed there as JSON."
        ),
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.2, metavar="SECONDS", help="How often to look.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Tell what there is to tell now, and end.")] = False,
) -> None:
    """Tell of incidents, of recoveries, of faults that recur, of stale checkpoints, of no progress, and of the end.

    One JSON line per alert on standard output, each told once; ends when the run does. That a fault was recovered from
    and that it recurs are different alerts. A webhook that does not answer is tried three times, then it is said.

    Example:

        ridethrough alert my-run --webhook https://hooks.example/training
    """
    from ridethrough.ledger.reading import LedgerError
    from ridethrough.ledger.rundir import RunDirError
    from ridethrough.ledger.summary import read_run
    from ridethrough.report.alerts import Watch
    from ridethrough.report.live import life
    from ridethrough.report.status import status_of
    from ridethrough.report.webhook import WebhookError, check_url, send

    path = find(runs, run)
    with usage_errors(WebhookError):
        if webhook is not None:
            check_url(webhook)
    watch = Watch()
    while True:
        begun = time.monotonic()
        with usage_errors(RunDirError):
            alive = life(path)
        try:
            ledger = read_run(path, alive.end_ns)
        except LedgerError as error:
            if not alive.running:
                with usage_errors(LedgerError):
                    raise error
            time.sleep(every)  # just begun
            continue
        status = status_of(ledger, running=alive.running)
        for found in watch.look(status, ledger.incidents):
            print(json.dumps(found.as_json()), flush=True)
            if webhook is not None:
                try:
                    send(webhook, found)
                except WebhookError as error:
                    print(f"ridethrough: {error}", file=sys.stderr, flush=True)
        if once or status.state in ("ended", "died"):
            return
        time.sleep(max(every, 4 * (time.monotonic() - begun)))
