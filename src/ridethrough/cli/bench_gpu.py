"""`ridethrough bench gpu`: restarts, saves and the memory tier on one GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.usage import fail


def gpu(
    parts: Annotated[
        str, typer.Option("--parts", metavar="A,B,...", help="Which to run, or `all`; `list` explains them.")
    ] = "all",
    dim: Annotated[
        int, typer.Option("--dim", min=64, help="Width of the model that is saved, a multiple of 64.")
    ] = 2048,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="Its layers; 24 of 2048 are 15.3 GB with the optimizer.")
    ] = 24,
    step_s: Annotated[
        float, typer.Option("--step-s", min=0.001, metavar="SECONDS", help="Of a step between saves.")
    ] = 0.2,
    cycles: Annotated[int, typer.Option("--cycles", min=1, help="Restarts in place.")] = 50,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Blocks of each kind of our own saves.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=20, help="Of each block of steps with saves.")] = 80,
    peers: Annotated[
        str, typer.Option("--peers", metavar="M,N,...", help="Of `bench checkpoint`'s modes; they are imported here.")
    ] = "torch-save,dcp-async,nvrx-async",
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", help="Longest time of one job.")] = 300.0,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the jobs' logs here.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure restarts, sticky CUDA errors, saves and the memory tier on this machine's first GPU.

    One rank with NCCL and FSDP2. Every cost is what it adds to the wall, beside the same steps without. Takes about
    20 minutes, 100 GB of host memory and 50 GB of disk at the sizes above, where $TMPDIR is; peers are measured if
    they can be imported here.

    Examples:

        ridethrough bench gpu --json gpu.json
        ridethrough bench gpu --parts restarts,gate --cycles 20
    """
    import torch

    from ridethrough.bench.checkpoint_sweep import MODES
    from ridethrough.bench.gpu import PARTS, GpuBench, run_gpu
    from ridethrough.bench.gpu import __doc__ as about
    from ridethrough.bench.gpu_tables import tables
    from ridethrough.cli.bench import chosen
    from ridethrough.cli.table import print_table

    if parts == "list":
        print((about or "").split("\n\n", 1)[1].rstrip())
        return
    names = chosen("--parts", parts, PARTS)
    if not torch.cuda.is_available():
        fail("bench gpu needs a GPU that torch can use; `bench recovery` and `bench checkpoint` do without")
    if dim % 64:
        fail(f"--dim {dim}: give a multiple of 64")
    modes = chosen("--peers", peers, MODES)
    bench = GpuBench(names, dim, layers, step_s=step_s, cycles=cycles, reps=reps, steps=steps, peers=modes)
    bench = replace(bench, limit_s=limit, keep=keep)
    result = run_gpu(bench, lambda line: print(line, file=sys.stderr, flush=True))
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        for title, header, rows in tables(result["results"]):
            print(f"\n{title}")
            print_table(header, rows)
    if result["cut_off"]:
        raise typer.Exit(130)
    if any(row["error"] for row in result["results"]):
        raise typer.Exit(1)
