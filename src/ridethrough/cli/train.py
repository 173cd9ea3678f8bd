"""`ridethrough train`: the reference job, launched protected."""

from __future__ import annotations

from typing import Annotated

import typer

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli import run_options as ro
from ridethrough.cli.command import App
from ridethrough.cli.policy_file import PolicyFile, read_policy
from ridethrough.cli.usage import usage_errors

app = App()
_PRELOAD = ["ridethrough.train.loop", "ridethrough.train.options"]


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": True,
    }
)
def train(
    ctx: typer.Context,
    nproc_per_node: ro.NprocPerNode = "1",
    max_restarts: ro.MaxRestarts = 100,
    stop_grace: ro.StopGrace = 10.0,
    policy_file: PolicyFile = None,
    runs: la.Runs = None,
    run_id: la.RunId = None,
    quiet: la.Quiet = False,
    fault_count: fo.FaultCount = 0,
    fault_seed: fo.FaultSeed = 42,
    fault_types: fo.FaultTypes = fo.DEFAULT_TYPES,
    fault_type_weights: fo.FaultTypeWeights = None,
    fault_phases: fo.FaultPhases = None,
    fault_at_once: fo.FaultAtOnce = 1,
    fault_at: fo.FaultAt = None,
    fault_schedule: fo.FaultSchedule = None,
    options: Annotated[
        bool, typer.Option("--options", help="List the job's own options (--preset, --data, --steps, ...) and exit.")
    ] = False,
) -> None:
    """Train the reference Llama on text, protected.

    Takes the options below and the job's own: `--preset`, `--data`, `--steps`, `--checkpoint-every` and more, which
    `ridethrough train --options` lists.

    Examples:

        ridethrough train --nproc-per-node 4 --preset tiny --steps 200
        ridethrough train --nproc-per-node gpu --preset 1b --dtype bf16 --data tokens/
        ridethrough train --nproc-per-node 2 --fault-count 3 --fault-types exception,sigkill
    """
    from ridethrough.launch.config import LaunchConfig
    from ridethrough.train.config import ConfigError, check
    from ridethrough.train.options import parse_args

    if options:
        parse_args(["--help"])
    with usage_errors(ValueError, ConfigError):
        workers = la.num_workers(nproc_per_node)
        la.check_machine(workers)
        config = parse_args(list(ctx.args))
        check(config, workers)
    policy = read_policy(ctx, policy_file)
    schedule = fo.schedule_from_options(
        count=fault_count,
        seed=fault_seed,
        types=fault_types,
        weights=fault_type_weights,
        steps=config.steps,
        world_size=workers,
        phases=fault_phases,
        at_once=fault_at_once,
        at=fault_at,
        file=fault_schedule,
    )
    code = la.start_job(
        LaunchConfig(
            command=["-m", "ridethrough.train", *ctx.args],
            num_workers=workers,
            policy=policy,
            preload=_PRELOAD,
            echo=not quiet,
        ),
        config={"train": config.model_dump(), "nproc_per_node": workers},
        runs=runs,
        run_id=run_id,
        schedule=schedule,
    )
    raise typer.Exit(code)
