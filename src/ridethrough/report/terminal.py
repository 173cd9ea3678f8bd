"""Tables for the terminal (rich): incidents, ledger, goodputs, losses."""

from __future__ import annotations

import numpy as np
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ridethrough.ledger.history import History
from ridethrough.ledger.incidents import Incident, place
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.schema import UP
from ridethrough.ledger.summary import RunLedger, final_results


def print_run(console: Console, ledger: RunLedger) -> None:
    """All of it, in the order in which an operator asks: what happened, where the time went, what came out."""
    console.print(incidents_table(ledger.incidents))
    console.print(ledger_table(ledger.part))
    console.print(goodput_lines(ledger.part))
    if ledger.part.warning:
        console.print(f"[yellow]warning:[/] {escape(ledger.part.warning)}")
    console.print(losses_table(ledger))


def incidents_table(found: list[Incident]) -> Group:
    """One row per incident, times counted from the fault; below, each one's root cause."""
    table = Table(title=f"Incidents ({len(found)})", title_justify="left", box=None, pad_edge=False)
    numbers = ("rank", "detected", "first step", "caught up", "lost")
    for name in ("id", "class", "injected", "rank", "where", "rung", "detected", "first step", "caught up", "lost"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != "where")
    causes = []
    for i in found:
        where = place(i.phase, i.step)
        row = [i.id, i.class_, " ".join(i.injected) or "-", _number(i.rank), where, i.rung or "open", _s(i.detected_s)]
        table.add_row(*(escape(cell) for cell in [*row, _s(i.first_step_s), _s(i.caught_up_s), _number(i.steps_lost)]))
        causes.append(Text(f"{i.id}: {last_line(i.root_cause)}", style="dim"))
    return Group(table, *causes)


def ledger_table(part: Partition) -> Table:
    """Every state that has time, in seconds of all slots together and per cent; the sum row is wall x slots."""
    total = part.wall_ns * part.slots
    table = Table(title=f"Ledger: wall {part.wall_ns / 1e9:.3f} s x {part.slots} slots", title_justify="left")
    table.add_column("state")
    table.add_column("seconds", justify="right")
    table.add_column("%", justify="right")
    table.add_column("counted as")
    for state, ns in part.states_ns.items():
        style = None if ns else "dim"
        table.add_row(state, f"{ns / 1e9:.3f}", percent(ns, total), counted_as(state), style=style)
    table.add_section()
    same = "= wall x slots, to the nanosecond" if sum(part.states_ns.values()) == total else "differs from the wall"
    table.add_row("sum", f"{sum(part.states_ns.values()) / 1e9:.3f}", percent(total, total), same, style="bold")
    return table


def goodput_lines(part: Partition) -> str:
    """Two lines: both goodputs with their formula."""
    return (
        f"training goodput        {part.training_goodput:7.2%}  (step / wall)\n"
        f"infrastructure goodput  {part.infrastructure_goodput:7.2%}  (up / wall)"
    )


def losses_table(ledger: RunLedger, rows: int = 8) -> Table:
    """Training loss at some steps, the newest word on each, and the final results."""
    table = Table(title="Losses", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    points = losses(ledger.past)
    every = max(1, -(-len(points) // rows))
    shown = [p for n, p in enumerate(points, 1) if n % every == 0 or n in (1, len(points))]
    for step, loss in shown:
        table.add_row(str(step), f"{loss:.6f}")
    final = final_results(ledger.events)
    table.add_section()
    for name in ("final_loss", "val_loss"):
        if isinstance(final.get(name), (int, float)):
            table.add_row(name.replace("_", " "), f"{final[name]:.6f}")
    return table


def losses(past: History) -> list[tuple[int, float]]:
    """`(step, loss)` in the order of steps, of the lowest rank that logged any: the newest value of each step."""
    ranks = [r for g in past.generations for r, s in g.steps.items() if s.metric("loss") is not None]
    newest: dict[int, float] = {}
    for generation in past.generations:
        steps = generation.steps.get(min(ranks)) if ranks else None
        values = steps.metric("loss") if steps is not None else None
        if steps is not None and values is not None:
            good = np.isfinite(values)
            newest.update(zip(steps.step[good].tolist(), values[good].tolist(), strict=True))
    return sorted(newest.items())


def counted_as(state: str) -> str:
    """The column of docs/ledger.md: productive, up, or infrastructure down."""
    if state == "queued":
        return "-"
    return "productive, up" if state == "step" else "up" if state in UP else "infrastructure down"


def percent(ns: int, total: int) -> str:
    return f"{ns / total:.2%}" if total else "-"


def last_line(cause: str | None) -> str:
    """The line of a traceback that says what it was."""
    lines = [line for line in (cause or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "-"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
