"""`ridethrough bench checkpoint`: what saving costs, over windows, sizes and modes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.usage import fail

_DEFAULT_MODES = "none,ridethrough,ridethrough-sync,torch-save,dcp-save,dcp-async"


def checkpoint(
    modes: Annotated[
        str, typer.Option("--modes", metavar="M,N,...", help="Which to run, or `all`; `list` explains them.")
    ] = _DEFAULT_MODES,
    windows: Annotated[
        str, typer.Option("--windows", metavar="X,...", help="Time between saves, in times of one dcp.save.")
    ] = "10,3,1,0.5",
    ranks: Annotated[str, typer.Option("--ranks", metavar="N,...", help="World sizes.")] = "2",
    state_mb: Annotated[str, typer.Option("--state-mb", metavar="MB,...", help="State of one rank, in MiB.")] = "512",
    compute: Annotated[
        str, typer.Option("--compute", metavar="wait|busy", help="Steps wait as for a GPU, or keep a core busy.")
    ] = "wait",
    interval: Annotated[int, typer.Option("--interval", min=1, help="Steps between saves.")] = 10,
    saves: Annotated[int, typer.Option("--saves", min=1, help="Saves in each window.")] = 4,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Jobs of each mode and size, interleaved.")] = 1,
    storage_mbps: Annotated[
        float,
        typer.Option(
            "--storage-mbps", min=0, help="Slow the storage down to so many MB/s for the whole job; 0: don't."
        ),
    ] = 0.0,
    peer_env: Annotated[
        list[str] | None,
        typer.Option("--peer-env", metavar="nvrx=PATH", help="The virtual environment with NVRx."),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", help="Longest time of one job.")] = 600.0,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the jobs' logs here.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure what checkpoints cost a training loop, by what they add to its wall, beside every peer.

    Each row has its control, the same loop without saves, in the same job. Efficiency is control / wall without the
    final drain; it counts only if the newest durable state is never older than two writes and an interval and if
    the last save loads and is right: the table says so.

    Examples:

        ridethrough bench checkpoint --modes all --peer-env nvrx=.venv-peers
        ridethrough bench checkpoint --compute busy --storage-mbps 200 --windows 3,1
    """
    from ridethrough.bench.checkpoint_sweep import MODES, Sweep, run_sweep
    from ridethrough.cli.bench import chosen, peers
    from ridethrough.cli.table import print_table

    if modes == "list":
        print_table(["mode", "what it is"], [[name, about] for name, (_, about) in MODES.items()])
        return
    if compute not in ("wait", "busy"):
        fail(f"--compute {compute}: wait or busy")
    sweep = Sweep(
        modes=chosen("--modes", modes, MODES),
        windows=_numbers("--windows", windows),
        world_sizes=[int(n) for n in _numbers("--ranks", ranks)],
        state_bytes=[int(n * (1 << 20)) for n in _numbers("--state-mb", state_mb)],
        compute=compute,
        interval=interval,
        saves=saves,
        reps=reps,
        storage_mbps=storage_mbps,
        peers=peers(peer_env),
        limit_s=limit,
        keep=keep,
    )
    try:
        result = run_sweep(sweep, lambda line: print(line, file=sys.stderr, flush=True))
    except RuntimeError as error:
        fail(str(error))
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        _show(result)
    if any(row["error"] for row in result["results"]):
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from ridethrough.cli.table import print_lines

    header = ["mode", "ranks", "MiB", "window", "efficiency", "added s", "blocked s", "write s", "fresh s", "counts"]
    rows = []
    for row in result["results"]:
        cells = [row["mode"], str(row["world_size"]), str(row["state_bytes"] >> 20), f"{row['window']:g}x"]
        cells.append(f"{row['efficiency']:.3f}" if row["efficiency"] is not None else "-")
        names = ("added_s_per_save", "blocked_s_per_save", "write_s", "freshness_s")
        cells += [f"{row[name]:.3f}" if row[name] is not None else "-" for name in names]
        rows.append([*cells, verdict(row)])
    print_lines(header, rows)
    for row in result["missing"]:
        print(f"not measured: {row['mode']}: {row['error']}")


def verdict(row: dict[str, Any]) -> str:
    """Whether the row's efficiency counts, or why not."""
    from ridethrough.bench.checkpoint_sweep import why_not

    reason = why_not(row)
    return "yes" if reason is None else reason


def _numbers(flag: str, text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or any(number <= 0 for number in found):
        fail(f"{flag} {text}: give numbers above 0, like 10,3,1")
    return found
