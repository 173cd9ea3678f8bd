"""`ridethrough bench shadow`: the matrix for one's own script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.usage import fail, usage_errors


def shadow(
    ctx: typer.Context,
    script: Annotated[Path, typer.Option("--script", metavar="FILE", help="A script that calls rt.run.")],
    mechanisms: Annotated[
        str, typer.Option("--mechanisms", metavar="A,B", help="As `bench recovery --mechanisms list` explains.")
    ] = "ridethrough,torchrun,restart-job",
    faults: Annotated[str, typer.Option("--faults", metavar="KIND,...", help="Kinds of fault.")] = "exception,sigkill",
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks, on this machine.")] = 2,
    saves: Annotated[
        str,
        typer.Option("--saves", metavar="A,B", help="Ways to save, beside no saves: sync, async, memory; or `none`."),
    ] = "sync,async",
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between these saves.")] = 5,
    peer_env: Annotated[
        list[str] | None,
        typer.Option("--peer-env", metavar="nvrx=PATH", help="With NVRx, ridethrough and what the script imports."),
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, metavar="SECONDS", help="Time for everything together.")
    ] = 600.0,
    fault_step: Annotated[int, typer.Option("--fault-step", min=2, help="The step that the last rank fails in.")] = 5,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where {out} folders are made: your own file system.")
    ] = Path(),
    mtbf: Annotated[float, typer.Option("--mtbf-h", min=0.001, help="Hours between failures, for the advice.")] = 24.0,
    json: JsonOption = None,
) -> None:
    """Measure what saves cost YOUR script and how it comes back from faults under each mechanism; say what to turn on.

    Arguments of the script go after `--`; `{out}` in them becomes a fresh folder for each run, so that no run finds the
    checkpoints of another or touches yours. Runs are ended when they have caught up: the script need not end.

    Example:

        ridethrough bench shadow --script train.py --folder /fsx --budget 900 -- --ckpt {out}/ckpt --lr 3e-4
    """
    from ridethrough.bench.recovery import FAULTS
    from ridethrough.bench.shadow import SHADOWED, Shadow, run_shadow
    from ridethrough.bench.shadow_saves import SAVES
    from ridethrough.cli.bench import chosen, peers
    from ridethrough.cli.table import print_table
    from ridethrough.faults.schedule import ScheduleError

    if not script.is_file():
        fail(f"--script {script}: no such file")
    if not folder.is_dir():
        fail(f"--folder {folder}: no such folder")
    asked = Shadow(
        command=[str(script.absolute()), *ctx.args],
        mechanisms=chosen("--mechanisms", mechanisms, SHADOWED),
        faults=chosen("--faults", faults, FAULTS),
        num_ranks=nproc_per_node,
        budget_s=budget,
        fault_step=fault_step,
        folder=folder.absolute(),
        python=sys.executable,
        mtbf_h=mtbf,
        saves=[] if saves == "none" else chosen("--saves", saves, SAVES),
        save_every=save_every,
        peers=peers(peer_env),
    )
    with usage_errors(ScheduleError):
        result = run_shadow(asked, lambda line: print(line, file=sys.stderr, flush=True))
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        if result["saves"]:
            header = ["saves", "step s", "added s per save", "write s", "trouble"]
            print_table(header, [_saves_cells(row) for row in result["saves"]])
        names = ("detected_s", "all_out_s", "first_step_s", "caught_up_s")
        rows = []
        for row in result["results"]:
            cells = [row["fault"], row["mechanism"]]
            cells += [f"{row[name]:.2f}" if row[name] is not None else "-" for name in names]
            rows.append([*cells, str(row["steps_lost"]), row["error"] or ""])
        print_table(["fault", "mechanism", "detected", "all out", "first step", "caught up", "lost", "trouble"], rows)
        for line in result["advice"]:
            print(f"- {line}")
    if any(row["error"] for row in (*result["saves"], *result["results"])):
        raise typer.Exit(1)


def _saves_cells(row: dict[str, Any]) -> list[str]:
    figures = [row[name] for name in ("step_s", "added_s_per_save", "write_s")]
    return [row["mode"], *(f"{figure:.3f}" if figure is not None else "-" for figure in figures), row["error"] or ""]
