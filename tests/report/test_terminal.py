"""Tables for the terminal."""

from __future__ import annotations

import io
from pathlib import Path

from ledger_cases import around, event, worked_case, write
from rich.console import Console

from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.schema import STATES
from ridethrough.ledger.summary import read_run
from ridethrough.report.terminal import losses, print_run


def test_all_tables(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={}, command=[], schedule_hash=None)
    events = worked_case()
    for e in events:
        if e["kind"] == "step":
            e["loss"] = 5.0 - e["step"] / 10 - e["generation"] / 100
    write(run.path, "h-coordinator-1", around())
    final = event("final", 18.5, generation=1, rank=0, final_hash="f", final_loss=3.99, val_loss=4.5)
    write(run.path, "h-worker-2", [*events, final])
    ledger = read_run(run.path)
    assert losses(ledger.past)[3:5] == [(4, 4.6), (5, 4.49)]  # what was done again replaces what was lost

    out = io.StringIO()
    print_run(Console(file=out, width=200), ledger)
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in out.getvalue().splitlines()]
    states = {row[0]: row[1:3] for row in rows if row[0] in STATES}
    assert list(states) == list(STATES)
    assert states["step"] == ["10.000", "54.05%"] and states["lost_step"] == ["3.000", "16.22%"]
    assert ["sum", "18.500", "100.00%", "= wall x slots, to the nanosecond"] in rows
    assert any("training goodput" in row[0] and "54.05%" in row[0] for row in rows)
    incident = next(line.split() for line in out.getvalue().splitlines() if line.startswith("open-0-0 "))
    assert incident[:4] == ["open-0-0", "exception", "0", "0"] and incident[4:8] == ["forward", "of", "step", "8"]
    assert incident[8:] == ["open", "0.50", "s", "6.00", "s", "8.00", "s", "3"]
    assert "open-0-0: boom" in out.getvalue()
    assert ["val loss", "4.500000"] in rows
