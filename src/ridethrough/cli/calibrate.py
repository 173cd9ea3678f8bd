"""`ridethrough calibrate`: time limits from the longest seen of each phase, over several runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ridethrough.cli.advise import limits_table
from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.run_argument import Runs, find, read
from ridethrough.cli.usage import fail

app = App()


@app.command()
def calibrate(
    run: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs of the same kind; else the latest.")
    ] = None,
    runs: Runs = None,
    json: JsonOption = None,
) -> None:
    """Propose a time limit for each phase: three times the longest that any rank of the given runs needed.

    Give healthy runs with everything in them that is rightly slow: compilation, validation, a cold file system. A
    step's own deadline is learned while the job runs; its row shows what it would be. What --json writes is what
    `ridethrough run --policy` reads; it also
    has the runs' median times, which `ridethrough simulate --calibration` takes.

    Example:

        ridethrough calibrate healthy-1 healthy-2 --json limits.json
        ridethrough run --policy limits.json train.py
    """
    from ridethrough.report.measured_times import measured_times
    from ridethrough.report.timeouts import proposed_policy, time_limits, unseen

    names = run or ["latest"]
    ledgers = [read(find(runs, name)) for name in names]
    limits = time_limits(ledgers)
    if not limits:
        fail(f"{', '.join(names)}: no phase has ended there and no step was finished; give runs that trained")
    if json is not None:
        rows = [limit.as_json() for limit in limits]
        write_json({"policy": proposed_policy(limits), "limits": rows, "times": measured_times(ledgers)}, json)
        return
    Console(highlight=False).print(limits_table(limits))
    missing = unseen(limits)
    if missing:
        print(f"not seen in these runs, so the default stays: {', '.join(missing)}")
