"""`ridethrough advise`: what to change, from a run's own figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.run_argument import RunOrLatest, Runs, find, read

if TYPE_CHECKING:
    from ridethrough.report.advice import Report
    from ridethrough.report.timeouts import TimeLimit

app = App()


@app.command()
def advise(
    run: RunOrLatest = "latest",
    runs: Runs = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option("--gpu-hour-price", min=0, metavar="MONEY", help="Of one GPU; a rank counts as one.")
    ] = None,
    node_repair_hours: Annotated[
        float, typer.Option("--node-repair-hours", min=0, help="Until a lost node is replaced by its operator.")
    ] = 4.0,
    replica_gbit_s: Annotated[
        float, typer.Option("--replica-gbit-s", min=0.001, help="Network between two nodes, for the memory tier.")
    ] = 100.0,
    json: JsonOption = None,
) -> None:
    """Checkpoint interval, memory tier, time limits, spares, and what the recoveries cost: each with its formula.

    From one run's events: its stalls, writes, failure rate and longest phases. A short run with few incidents says
    little; the figures say from how much they come.

    Example:

        ridethrough advise my-run --gpu-hour-price 2.50
    """
    from ridethrough.report.advice import advise as advise_run

    report = advise_run(
        read(find(runs, run)),
        gpu_hour_price=gpu_hour_price,
        node_repair_h=node_repair_hours,
        replica_gbit_s=replica_gbit_s,
    )
    if json is not None:
        write_json(report.as_json(), json)
        return
    _print(report, gpu_hour_price)


def _print(report: Report, price: float | None) -> None:
    console = Console(highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]")
    for item in report.items:
        value = "not known" if item.value is None else f"{item.value:.4g} {item.unit}".rstrip()
        console.print(f"[bold]{escape(item.name)}[/]: {value}" + (f" ({escape(item.note)})" if item.note else ""))
        if item.value is not None:
            inputs = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in item.inputs.items())
            console.print(f"    = {escape(item.formula)}\n    from {escape(inputs)}\n    source: {escape(item.source)}")
    console.print(limits_table(report.limits))
    if report.costs:
        console.print(_costs(report, price))


def limits_table(limits: list[TimeLimit]) -> Table:
    table = Table(title="Time limits", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("phase", "seen", "p99", "longest", "default", "proposed", "setting"):
        table.add_column(name, justify="left" if name in ("phase", "setting") else "right", no_wrap=True)
    for row in limits:
        times = (f"{s:.3g} s" for s in (row.p99_s, row.longest_s, row.now_s, row.proposed_s))
        table.add_row(row.phase, str(row.count), *times, row.setting)
    table.caption = "\n".join({row.formula: f"{row.phase}: {row.formula}" for row in reversed(limits)}.values())
    table.caption_justify = "left"
    return table


def _costs(report: Report, price: float | None) -> Table:
    table = Table(title="What the recoveries cost", title_justify="left", box=None, pad_edge=False, header_style="bold")
    names = ["class", "incidents", "GPU hours", "each", *(["money"] if price is not None else [])]
    for name in names:
        table.add_column(name, justify="left" if name == "class" else "right")
    for cost in report.costs:
        money = [f"{cost.money:,.2f}"] if cost.money is not None else []
        table.add_row(cost.class_, str(cost.count), f"{cost.gpu_hours:.4f}", f"{cost.gpu_hours_each:.5f}", *money)
    table.caption = "ranks x time from the fault until the lost steps were done again"
    table.caption_justify = "left"
    return table
