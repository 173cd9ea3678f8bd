"""`ridethrough run`: launch a script protected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli.usage import fail, usage_errors

app = typer.Typer(rich_markup_mode="markdown")


@app.command(
    context_settings={"ignore_unknown_options": False, "allow_extra_args": True, "allow_interspersed_args": False}
)
def run(
    ctx: typer.Context,
    nproc_per_node: la.NprocPerNode = "1",
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes", metavar="N", help="Machines; more than one is not there yet.", rich_help_panel="Launch"
        ),
    ] = "1",
    standalone: Annotated[
        bool,
        typer.Option("--standalone", help="One machine, free ports; that is the default.", rich_help_panel="Launch"),
    ] = False,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.", rich_help_panel="Launch")
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option("--no-python", "--no_python", help="SCRIPT is a program of any kind.", rich_help_panel="Launch"),
    ] = False,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            "--preload",
            metavar="MODULE",
            help="Import it once, before ranks are forked; may be repeated.",
            rich_help_panel="Launch",
        ),
    ] = None,
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            "--master_port",
            min=0,
            max=65535,
            help="Port of the first store for process groups; 0 takes a free one.",
            rich_help_panel="Launch",
        ),
    ] = 0,
    max_restarts: la.MaxRestarts = 100,
    stop_grace: la.StopGrace = 10.0,
    runs: la.Runs = None,
    run_id: la.RunId = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--log_dir",
            metavar="DIR",
            help="Where the ranks' output goes; else the run's logs/.",
            rich_help_panel="Run folder and output",
        ),
    ] = None,
    quiet: la.Quiet = False,
    fault_count: fo.FaultCount = 0,
    fault_seed: fo.FaultSeed = 42,
    fault_types: fo.FaultTypes = fo.DEFAULT_TYPES,
    fault_type_weights: fo.FaultTypeWeights = None,
    fault_phases: fo.FaultPhases = None,
    fault_at_once: fo.FaultAtOnce = 1,
    fault_at: fo.FaultAt = None,
    fault_schedule: fo.FaultSchedule = None,
    fault_steps: Annotated[
        int,
        typer.Option(
            "--fault-steps",
            "--fault_steps",
            min=2,
            help="Steps of the job, for drawn faults.",
            rich_help_panel="Faults on purpose",
        ),
    ] = 200,
) -> None:
    """Launch SCRIPT with its ranks, and keep it running through faults.

    A script that calls `rt.run(train)` is restarted in place: only a dead process is replaced. One that doesn't is
    started anew as a whole, as torchrun does. Environment of the script: torchrun's.

    Examples:

        ridethrough run --nproc-per-node 4 train.py --lr 3e-4
        ridethrough run --nproc-per-node gpu -m mypackage.train
        ridethrough run --nproc-per-node 4 --fault-at sigkill:1:20 --fault-steps 100 train.py
    """
    from ridethrough.generation.policy import Policy

    if nnodes not in ("1", "1:1"):
        fail(f"--nnodes {nnodes}: this version launches on one machine; leave it out")
    if not ctx.args:
        fail("which script? ridethrough run [OPTIONS] SCRIPT [ARGS]; --help explains")
    script = ctx.args[0]
    if not module and not no_python and not Path(script).is_file():
        fail(f"{script}: no such script; give a file, -m MODULE, or --no-python PROGRAM")
    with usage_errors(ValueError):
        workers = la.num_workers(nproc_per_node)
        la.check_machine(workers)
    schedule = fo.schedule_from_options(
        count=fault_count,
        seed=fault_seed,
        types=fault_types,
        weights=fault_type_weights,
        steps=fault_steps,
        world_size=workers,
        phases=fault_phases,
        at_once=fault_at_once,
        at=fault_at,
        file=fault_schedule,
    )
    code = la.start_job(
        ["-m", *ctx.args] if module else list(ctx.args),
        workers=workers,
        config={"script": ctx.args, "nproc_per_node": workers, "max_restarts": max_restarts},
        argv=sys.argv,
        runs=runs,
        run_id=run_id,
        schedule=schedule,
        policy=Policy(max_restarts=max_restarts, stop_grace_s=stop_grace),
        preload=preload or [],
        quiet=quiet,
        no_python=no_python,
        master_port=master_port,
        log_dir=log_dir,
    )
    raise typer.Exit(code)
