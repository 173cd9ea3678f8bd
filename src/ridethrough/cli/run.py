"""`ridethrough run`: launch a script protected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli.policy_file import Observe, PolicyFile, read_policy
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
            "--nnodes",
            metavar="N|MIN:MAX",
            help="Machines; with a range the job may shrink to MIN.",
            rich_help_panel="Several machines",
        ),
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            "--rdzv_endpoint",
            metavar="HOST[:PORT]",
            help="Where the coordinator is: `ridethrough coordinator`, or the machine that HOST names, which "
            "then hosts it beside its agent.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="Only join the coordinator at the endpoint, never host it.",
            rich_help_panel="Several machines",
        ),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            "--token_file",
            metavar="FILE",
            help="The job's secret, the same on every machine; else RIDETHROUGH_TOKEN.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(
            "--local-addr",
            "--local_addr",
            metavar="HOST",
            help="This machine's address for its peers; else the one that reaches the coordinator.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    node_wait: Annotated[
        float,
        typer.Option(
            "--node-wait",
            "--node_wait",
            min=0,
            metavar="SECONDS",
            help="Wait for a machine in a lost one's place before shrinking or giving up.",
            rich_help_panel="Several machines",
        ),
    ] = 300.0,
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            min=0.5,
            metavar="SECONDS",
            help="A machine that was not heard of for so long is lost.",
            rich_help_panel="Several machines",
        ),
    ] = 5.0,
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
    policy_file: PolicyFile = None,
    observe: Observe = False,
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
        ridethrough run --nnodes 2 --rdzv-endpoint node0:29500 --token-file job.token --nproc-per-node 8 train.py
        ridethrough run --nproc-per-node 4 --fault-at sigkill:1:20 --fault-steps 100 train.py
    """
    from ridethrough.launch.config import LaunchConfig
    from ridethrough.launch.handshake import read_token

    if not ctx.args:
        fail("which script? ridethrough run [OPTIONS] SCRIPT [ARGS]; --help explains")
    script = ctx.args[0]
    if not module and not no_python and not Path(script).is_file():
        fail(f"{script}: no such script; give a file, -m MODULE, or --no-python PROGRAM")
    with usage_errors(ValueError):
        workers = la.num_workers(nproc_per_node)
        la.check_machine(workers)
        least, most = la.node_range(nnodes)
        endpoint = la.host_and_port("--rdzv-endpoint", rdzv_endpoint, 29500) if rdzv_endpoint else None
        token = read_token(token_file)
    if most > 1 and (endpoint is None or not token):
        fail("several machines need --rdzv-endpoint HOST:PORT and --token-file FILE, the same on each of them")
    policy = read_policy(
        ctx,
        policy_file,
        {
            "max_restarts": ("max_restarts", max_restarts),
            "stop_grace_s": ("stop_grace", stop_grace),
            "node_wait_s": ("node_wait", node_wait),
            "lease_s": ("lease", lease),
            "observe": ("observe", observe),
        },
    )
    schedule = fo.schedule_from_options(
        count=fault_count,
        seed=fault_seed,
        types=fault_types,
        weights=fault_type_weights,
        steps=fault_steps,
        world_size=workers * most,
        phases=fault_phases,
        at_once=fault_at_once,
        at=fault_at,
        file=fault_schedule,
    )
    code = la.start_job(
        LaunchConfig(
            command=["-m", *ctx.args] if module else list(ctx.args),
            num_workers=workers,
            no_python=no_python,
            policy=policy,
            preload=preload or [],
            min_nodes=least,
            max_nodes=most,
            endpoint=endpoint,
            may_host=not join,
            address=local_addr,
            token=token,
            master_port=master_port,
            echo=not quiet,
            log_dir=log_dir,
        ),
        config={"script": ctx.args, "nproc_per_node": workers, "nnodes": nnodes, "max_restarts": max_restarts},
        runs=runs,
        run_id=run_id,
        schedule=schedule,
    )
    raise typer.Exit(code)
