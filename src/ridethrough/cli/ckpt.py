"""`ridethrough ckpt`: look at checkpoints, verify them, thin them out, take a state out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ridethrough.checkpoint import inspect
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.table import print_table
from ridethrough.cli.usage import usage_errors

DAMAGED = 1

app = App(no_args_is_help=True, help="Checkpoints: ls, show, verify, prune, export.")

Root = Annotated[Path, typer.Argument(help="The root given to the Checkpointer, or one step-* folder in it.")]
Step = Annotated[int | None, typer.Option("--step", help="This step; the newest committed one if left out.")]


@app.command("ls")
def ls_command(root: Root, json: JsonOption = None) -> None:
    """List every attempt in ROOT, newest first: committed, partial (a save that did not finish) or damaged, and why.

    Example:

        ridethrough ckpt ls runs/my-run/checkpoints
    """
    with usage_errors(CheckpointError):
        rows = inspect.list_attempts(root)
    if json is not None:
        write_json(rows, json)
        return
    print_table(
        ["step", "state", "bytes", "ranks", "created", "attempt", "reason"],
        [
            [str(r["step"]), r["state"], f"{r['bytes']:,}", str(r["world_size"] or ""), r["created"] or "",
             r["attempt"], r["reason"]]
            for r in rows
        ],
    )  # fmt: skip


@app.command("show")
def show_command(root: Root, step: Step = None, json: JsonOption = None) -> None:
    """Show what one checkpoint holds, key by key.

    Example:

        ridethrough ckpt show runs/my-run/checkpoints --step 500
    """
    with usage_errors(CheckpointError):
        attempt = inspect.find(root, step)
        with inspect.naming_a_whole_one(attempt):
            found = inspect.show(attempt)
    if json is not None:
        write_json(found, json)
        return
    head = f"step {found['step']}, {found['bytes']:,} bytes, saved by {found['world_size']} ranks"
    typer.echo(f"{head}, generation {found['epoch']}.{found['generation']}, {found['created']}\n{found['path']}")
    rows = [
        [
            k["key"],
            k["dtype"] or "value",
            "" if k["shape"] is None else str(k["shape"]),
            f"{k['bytes']:,}",
            str(k["chunks"]),
        ]
        for k in found["keys"]
    ]
    print_table(["key", "dtype", "shape", "bytes", "chunks"], rows)


@app.command("verify")
def verify_command(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every committed one, not only the newest.")] = False,
    json: JsonOption = None,
) -> None:
    """Read every byte and compare it with its hash. Exit code 0: whole; 1: something is damaged.

    Example:

        ridethrough ckpt verify runs/my-run/checkpoints --all
    """
    with usage_errors(CheckpointError):
        attempts = inspect.committed(root) if every else [inspect.find(root, step)]
    results: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for attempt in attempts:
            bar = bars.add_task(attempt.path.name, total=(attempt.commit or {}).get("bytes"))
            wrong = inspect.verify(attempt, lambda n, bar=bar: bars.advance(bar, n))  # type: ignore[misc]
            results.append({"step": attempt.step, "path": str(attempt.path), "whole": not wrong, "reason": wrong})
    if json is not None:
        write_json(results, json)
    else:
        print_table(["step", "whole", "reason"], [[str(r["step"]), str(r["whole"]), r["reason"]] for r in results])
    if not results or not all(r["whole"] for r in results):
        raise typer.Exit(DAMAGED)


@app.command("prune")
def prune_command(
    root: Root,
    keep: Annotated[int, typer.Option("--keep", help="Newest committed ones to keep.", min=1)] = 3,
    keep_every: Annotated[int | None, typer.Option("--keep-every", help="Keep multiples of this step.", min=1)] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Also what is partial or damaged.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: JsonOption = None,
) -> None:
    """Delete old checkpoints of a ROOT that no job is writing to; the newest good one is verified first and stays.

    Example:

        ridethrough ckpt prune runs/my-run/checkpoints --keep 3 --dry-run
    """
    with usage_errors(CheckpointError):
        gone = inspect.prune(root, keep, keep_every, damaged, dry_run)
    if json is not None:
        write_json(gone, json)
        return
    verb = "would go" if dry_run else "deleted"
    print_table(
        ["step", "state", "bytes", verb], [[str(g["step"]), g["state"], f"{g['bytes']:,}", g["path"]] for g in gone]
    )


@app.command("export")
def export_command(
    root: Root,
    target: Annotated[
        Path, typer.Argument(help="New file: NAME.safetensors, or NAME.pt, .pth or .bin for torch.save.")
    ],
    step: Step = None,
    only: Annotated[str | None, typer.Option("--only", help="Only what is below this name, such as `model`.")] = None,
    json: JsonOption = None,
) -> None:
    """Write a checkpoint's whole state into one file, verifying every byte on the way.

    Example:

        ridethrough ckpt export runs/my-run/checkpoints model.safetensors --only model
    """
    with usage_errors(CheckpointError):
        attempt = inspect.find(root, step)
        with inspect.naming_a_whole_one(attempt):
            done = inspect.export(attempt, target, only)
    if json is not None:
        write_json(done, json)
    else:
        typer.echo(f"{done['path']}: step {done['step']}, {done['tensors']} tensors, {done['bytes']:,} bytes")
