"""`ridethrough bench memory`: what the memory tier costs, and how fast it is back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json


def memory(
    parts: Annotated[str, typer.Option("--parts", metavar="A,B", help="Which: cost, replicated, killed.")] = (
        "cost,replicated,killed"
    ),
    state_mb: Annotated[
        float, typer.Option("--state-mb", min=12, metavar="MB", help="State of a rank, for the costs.")
    ] = 240.0,
    step_s: Annotated[
        float, typer.Option("--step-s", min=0.01, metavar="SECONDS", help="What forward and backward last.")
    ] = 0.5,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Of a block, for the costs.")] = 20,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Blocks of each kind, in turn.")] = 5,
    killed_params: Annotated[
        float, typer.Option("--killed-params", min=1e6, help="Parameters of the job that is killed; 12 bytes each.")
    ] = 100e6,
    killed_ranks: Annotated[int, typer.Option("--killed-ranks", min=2, help="Its ranks.")] = 4,
    killed_reps: Annotated[int, typer.Option("--killed-reps", min=1, help="Runs of it.")] = 3,
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", help="Longest time of one job.")] = 300.0,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the jobs' logs here.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure what a snapshot of every step adds to the steps of a training job, alone and with a replica on a second
    node, and how long a killed rank's job takes until its state is back on all ranks.

    Forward and backward wait, as for a GPU; give the machine a free core for each rank. What a recovery is compared
    with, a copy of the state and a new process group, is measured in the same job.

    Examples:

        ridethrough bench memory
        ridethrough bench memory --parts cost --state-mb 1000 --step-s 1
    """
    from ridethrough.bench.memory import PARTS, MemoryBench, run_memory
    from ridethrough.bench.memory_tables import memory_tables
    from ridethrough.cli.bench import chosen
    from ridethrough.cli.table import print_table

    bench = MemoryBench(
        parts=chosen("--parts", parts, PARTS),
        state_mb=state_mb,
        step_s=step_s,
        steps=steps,
        reps=reps,
        killed_params=killed_params,
        killed_ranks=killed_ranks,
        killed_reps=killed_reps,
        limit_s=limit,
        keep=keep,
    )
    result = run_memory(bench, lambda line: print(line, file=sys.stderr, flush=True))
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        for title, header, rows in memory_tables(result["results"]):
            print(title)
            print_table(header, rows)
    if any(row["error"] for row in result["results"]):
        raise typer.Exit(1)
