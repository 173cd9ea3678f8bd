"""`ridethrough run`: launch a script protected."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli import run_meaning as rm
from ridethrough.cli import run_options as ro
from ridethrough.cli.command import App
from ridethrough.cli.policy_file import Observe, PolicyFile, read_policy
from ridethrough.cli.usage import fail, usage_errors
from ridethrough.ledger.rundir import RunDirError, writable_root

app = App()


@app.command(
    options_metavar="[OPTIONS] SCRIPT [ARGS]...",
    context_settings={
        "ignore_unknown_options": False,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "token_normalize_func": ro.spelled,
    },
)
def run(
    ctx: typer.Context,
    nproc_per_node: ro.NprocPerNode = "1",
    nnodes: ro.Nnodes = "1",
    rdzv_endpoint: ro.RdzvEndpoint = "",
    rdzv_backend: ro.RdzvBackend = "static",
    rdzv_conf: ro.RdzvConf = "",
    node_rank: ro.NodeRank = None,
    master_addr: ro.MasterAddr = None,
    master_port: ro.MasterPort = None,
    local_addr: ro.LocalAddr = None,
    node_name: ro.NodeName = "",
    join: ro.Join = False,
    token_file: ro.TokenFile = None,
    tls_cert: la.TlsCert = None,
    tls_key: la.TlsKey = None,
    tls_ca: la.TlsCa = None,
    node_wait: ro.NodeWait = 300.0,
    replicas: ro.Replicas = 1,
    replica_rate: ro.ReplicaRate = 0.0,
    lease: ro.Lease = 5.0,
    standalone: ro.Standalone = False,
    module: ro.Module = False,
    no_python: ro.NoPython = False,
    run_path: ro.RunPath = False,
    preload: ro.Preload = None,
    spares: ro.Spares = 1,
    role: ro.Role = "default",
    virtual_local_rank: ro.VirtualLocalRank = False,
    numa_binding: ro.NumaBinding = None,
    max_restarts: ro.MaxRestarts = 100,
    stop_grace: ro.StopGrace = 10.0,
    signals_to_handle: ro.SignalsToHandle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    policy_file: PolicyFile = None,
    observe: Observe = False,
    runs: la.Runs = None,
    run_id: la.OnlyRunId = None,
    rdzv_id: ro.RdzvId = None,
    log_dir: ro.LogDir = None,
    quiet: la.Quiet = False,
    redirects: ro.Redirects = "0",
    tee: ro.Tee = "0",
    local_ranks_filter: ro.LocalRanksFilter = "",
    duplicate_stdout_filters: ro.DuplicateOut = "",
    duplicate_stderr_filters: ro.DuplicateErr = "",
    fault_count: fo.FaultCount = 0,
    fault_seed: fo.FaultSeed = 42,
    fault_types: fo.FaultTypes = fo.DEFAULT_TYPES,
    fault_type_weights: fo.FaultTypeWeights = None,
    fault_phases: fo.FaultPhases = None,
    fault_at_once: fo.FaultAtOnce = 1,
    fault_at: fo.FaultAt = None,
    fault_schedule: fo.FaultSchedule = None,
    fault_steps: Annotated[
        int, typer.Option("--fault-steps", min=2, help="Steps of the job, for drawn faults.", rich_help_panel=ro.FAULTS)
    ] = 200,
    ft_rank_heartbeat_timeout: ro.RankHeartbeat = None,
    ft_initial_rank_heartbeat_timeout: ro.FirstHeartbeat = None,
    ft_workload_check_interval: ro.WorkloadCheck = None,
    ft_restart_policy: ro.RestartPolicy = None,
    monitor_interval: ro.MonitorInterval = None,
    start_method: ro.StartMethod = None,
    logs_specs: ro.LogsSpecs = None,
    event_log_handler: ro.EventLogHandler = None,
    ft_cfg_path: ro.FtConfig = None,
    ft_safety_factor: ro.FtSafetyFactor = None,
    ft_node_health_check_interval: ro.FtNodeCheck = None,
    ft_rank_termination_signal: ro.FtSignal = None,
    ft_log_level: ro.FtLogLevel = None,
    ft_rank_out_of_section_timeout: ro.FtOutOfSection = None,
    ft_rank_section_timeouts: ro.FtSections = None,
    ft_restart_check_interval: ro.FtRestartCheck = None,
    ft_enable_nic_monitor: ro.FtNic = None,
    ft_pci_topo_file: ro.FtTopology = None,
    ft_link_down_path_template: ro.FtLinkDown = None,
) -> None:
    """Launch SCRIPT with its ranks, and keep it running through faults.

    A script that calls `rt.run(train)` is restarted in place: only a dead process is replaced. One that doesn't is
    started anew as a whole, as torchrun does. torchrun's options (also with underscores), its `PET_` variables and the
    environment of the script are as they are there.

    Examples:

        ridethrough run --nproc-per-node 4 train.py --lr 3e-4
        ridethrough run --nproc-per-node gpu -m mypackage.train
        ridethrough run --nnodes 2 --rdzv-endpoint node0:29500 --token-file job.token --nproc-per-node 8 train.py
        ridethrough run --nproc-per-node 4 --fault-at sigkill:1:20 --fault-steps 100 train.py
    """
    from ridethrough.generation.handshake import read_token
    from ridethrough.launch.config import LaunchConfig
    from ridethrough.launch.tls import read_tls

    if not ctx.args:
        fail("which script? ridethrough run [OPTIONS] SCRIPT [ARGS]; --help explains")
    command, executed = _command(ctx.args, module=module, no_python=no_python and not run_path)
    with usage_errors(ValueError):
        rm.check_choices(ctx.params)
        workers = la.num_workers(nproc_per_node)
        la.check_machine(workers)
        least, most = la.node_range(nnodes)
        meeting = rm.meeting(
            most_nodes=most,
            standalone=standalone,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_backend=rdzv_backend,
            rdzv_conf=rdzv_conf,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            local_addr=local_addr,
        )
        heartbeats = rm.heartbeat_limits(ft_rank_heartbeat_timeout, ft_initial_rank_heartbeat_timeout)
        signals = rm.signals(signals_to_handle)
        hidden = rm.hidden_streams(redirects, tee, workers)
        shown_ranks = rm.local_ranks(local_ranks_filter)
        token = read_token(token_file)
        tls = read_tls(tls_cert, tls_key, tls_ca)
    with usage_errors(RunDirError):
        if log_dir is not None:
            writable_root(log_dir)
    if most > 1 and (meeting.endpoint is None or not token):
        fail("several machines need --rdzv-endpoint HOST:PORT and --token-file FILE, the same on each of them")
    if not token:
        meeting.endpoint = None  # one machine, and nobody can prove to belong to it
    for line in rm.without_meaning(ctx.params) + meeting.notes:
        print(f"ridethrough: {line}", file=sys.stderr)
    policy = read_policy(
        ctx,
        policy_file,
        {
            **{name: ("rdzv_conf", value) for name, value in meeting.policy.items()},
            **{name: (_HEARTBEATS[name], value) for name, value in heartbeats.items()},
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
            command=command,
            num_workers=workers,
            no_python=executed,
            policy=policy,
            preload=preload or [],
            spares=spares,
            min_nodes=least,
            max_nodes=most,
            endpoint=meeting.endpoint,
            may_host=meeting.may_host is not False and not join,
            must_host=meeting.may_host is True and not join,
            place=node_rank,
            address=meeting.address,
            node_name=node_name,
            token=token,
            tls=tls,
            replicas=replicas,
            replica_rate=replica_rate * 1e6,
            master_port=meeting.store_port,
            role=role,
            virtual_local_rank=virtual_local_rank,
            numa_binding=numa_binding,
            signals=signals,
            echo=not quiet,
            hidden=hidden,
            shown_ranks=shown_ranks,
            filters={"out": rm.words(duplicate_stdout_filters), "err": rm.words(duplicate_stderr_filters)},
            log_dir=log_dir,
        ),
        config={"script": ctx.args, "nproc_per_node": workers, "nnodes": nnodes, "max_restarts": max_restarts},
        runs=runs,
        run_id=run_id,
        rdzv_id=None if standalone else rdzv_id,
        schedule=schedule,
    )
    raise typer.Exit(code)


_HEARTBEATS = {
    "heartbeat_limit_s": "ft_rank_heartbeat_timeout",
    "first_heartbeat_limit_s": "ft_initial_rank_heartbeat_timeout",
}


def _command(args: list[str], *, module: bool, no_python: bool) -> tuple[list[str], bool]:
    """What to run, and whether it is a program to execute rather than Python code for the zygote."""
    if module and no_python:
        fail("--module and --no-python: give one of them")
    if not module and not no_python and not Path(args[0]).is_file():
        fail(f"{args[0]}: no such script; give a file, -m MODULE, or --no-python PROGRAM")
    command = ["-m", *args] if module else list(args)
    interpreter = os.environ.get("PYTHON_EXEC")  # torchrun's way to name another interpreter
    if interpreter and not no_python:
        return [interpreter, "-u", *command], True
    return command, no_python
