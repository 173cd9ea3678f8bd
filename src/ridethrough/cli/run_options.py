"""The options of `ridethrough run`: all of torchrun's, ft_launcher's, and its own. What they mean is in `run_meaning`.

Each may be written with `-` or `_`. torchrun's also have torchrun's environment variables: PET_NNODES, PET_RDZV_ID, ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.command import dashed

LAUNCH = "Launch"
NODES = "Several machines"
RECOVERY = "Recovery"
OUTPUT = "Run folder and output"
FAULTS = "Faults on purpose"
COMPATIBLE = "Accepted from torchrun and ft_launcher"


def spelled(name: str) -> str:
    """The name of an option as we spell it; ft_launcher's older versions said --ft-param-."""
    return dashed(name).replace("ft-param-", "ft-")


def _torchrun(panel: str, name: str, help: str, *more_names: str, **settings: Any) -> Any:
    variable = "PET_" + name.lstrip("-").replace("-", "_").upper()
    return typer.Option(
        *more_names, name, envvar=variable, show_envvar=False, help=help, rich_help_panel=panel, **settings
    )


def _own(panel: str, name: str, help: str, *more_names: str, **settings: Any) -> Any:
    return typer.Option(name, *more_names, help=help, rich_help_panel=panel, **settings)


def _ft(name: str, help: str, panel: str = COMPATIBLE, **settings: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, **settings)


# --- Launch ----------------------------------------------------------------------------------------------------------

NprocPerNode = Annotated[
    str,
    _torchrun(
        LAUNCH,
        "--nproc-per-node",
        "Ranks on this machine: a number, one per GPU, one per core, or GPUs where there are some.",
        metavar="N|gpu|cpu|auto",
    ),
]
Standalone = Annotated[
    bool, _torchrun(LAUNCH, "--standalone", "One machine, free ports (the default); an endpoint is ignored.")
]
Module = Annotated[bool, _torchrun(LAUNCH, "--module", "SCRIPT is a module, as in `python -m`.", "-m")]
NoPython = Annotated[bool, _torchrun(LAUNCH, "--no-python", "SCRIPT is a program of any kind.")]
RunPath = Annotated[
    bool, _torchrun(LAUNCH, "--run-path", "SCRIPT is a file to be run by a running interpreter, as all are here.")
]
Preload = Annotated[
    list[str] | None,
    _own(LAUNCH, "--preload", "Import it once, before ranks are forked; may be repeated.", metavar="MODULE"),
]
Spares = Annotated[
    int,
    _own(LAUNCH, "--spares", "Warm spares: processes with torch imported that wait for a rank to need one.", min=0),
]
Role = Annotated[str, _torchrun(LAUNCH, "--role", "ROLE_NAME in the script's environment.", metavar="NAME")]
VirtualLocalRank = Annotated[
    bool, _torchrun(LAUNCH, "--virtual-local-rank", "LOCAL_RANK is 0 on every rank, which sees its own GPU only.")
]
NumaBinding = Annotated[
    str | None,
    _torchrun(
        LAUNCH,
        "--numa-binding",
        "Bind each rank to the cores near its GPU.",
        metavar="node|socket|exclusive|core-complex",
    ),
]

# --- Several machines ------------------------------------------------------------------------------------------------

Nnodes = Annotated[
    str, _torchrun(NODES, "--nnodes", "Machines; with a range the job may shrink to MIN.", metavar="N|MIN:MAX")
]
RdzvEndpoint = Annotated[
    str,
    _torchrun(
        NODES,
        "--rdzv-endpoint",
        "Where the coordinator is: `ridethrough coordinator`, or the machine that HOST names, which then hosts it "
        "beside its agent.",
        metavar="HOST[:PORT]",
    ),
]
RdzvBackend = Annotated[
    str,
    _torchrun(NODES, "--rdzv-backend", "c10d or static: both are the coordinator at the endpoint.", metavar="NAME"),
]
RdzvConf = Annotated[
    str,
    _torchrun(
        NODES,
        "--rdzv-conf",
        "Known are join_timeout, last_call_timeout, timeout, is_host, keep_alive_interval, keep_alive_max_attempt.",
        metavar="KEY=VALUE,...",
    ),
]
NodeRank = Annotated[
    int | None,
    _torchrun(NODES, "--node-rank", "This machine's place in the order of ranks.", min=0, show_default="first come"),
]
MasterAddr = Annotated[
    str | None,
    _torchrun(
        NODES,
        "--master-addr",
        "With several machines and no endpoint: the machine of node rank 0, which hosts the coordinator.",
        metavar="HOST",
    ),
]
MasterPort = Annotated[
    int | None,
    _torchrun(
        NODES,
        "--master-port",
        "With --master-addr: the coordinator's port. Else: the first store's; later ones take free ports.",
        min=0,
        max=65535,
        show_default="a free one",
    ),
]
LocalAddr = Annotated[
    str | None,
    _torchrun(
        NODES,
        "--local-addr",
        "This machine's address for its peers; else the one that reaches the coordinator.",
        metavar="HOST",
    ),
]
NodeName = Annotated[
    str,
    _own(
        NODES,
        "--node-name",
        "What a cordon calls this machine; else its host name, which a pod takes along to another one.",
        metavar="NAME",
    ),
]
Join = Annotated[bool, _own(NODES, "--join", "Only join the coordinator at the endpoint, never host it.")]
TokenFile = Annotated[
    Path | None,
    _own(
        NODES,
        "--token-file",
        "The job's secret, the same on every machine; else RIDETHROUGH_TOKEN.",
        metavar="FILE",
    ),
]
Replicas = Annotated[
    int,
    _own(
        NODES,
        "--replicas",
        "Other machines that hold a copy of each machine's newest snapshot: 1, or 0 to do without.",
        min=0,
        max=1,
    ),
]
ReplicaRate = Annotated[
    float,
    _own(
        NODES,
        "--replica-rate",
        "What a machine may send for that, in MB per second; 0: as fast as the network.",
        min=0,
        metavar="MB/S",
    ),
]
NodeWait = Annotated[
    float,
    _own(
        NODES,
        "--node-wait",
        "Wait for a machine in a lost one's place before shrinking or giving up.",
        min=0,
        metavar="SECONDS",
    ),
]
Lease = Annotated[
    float,
    _own(NODES, "--lease", "A machine that was not heard of for so long is lost.", min=0.5, metavar="SECONDS"),
]

# --- Recovery --------------------------------------------------------------------------------------------------------

MaxRestarts = Annotated[
    int,
    _torchrun(
        RECOVERY,
        "--max-restarts",
        "Restarts of the whole job; 0 turns recovery off and passes the worker's exit code on.",
        min=0,
    ),
]
StopGrace = Annotated[
    float,
    typer.Option(
        "--stop-grace",
        "--shutdown-timeout",
        envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        show_envvar=False,
        min=0.1,
        metavar="SECONDS",
        help="Time for the last save after Ctrl-C or SIGTERM; then SIGKILL.",
        rich_help_panel=RECOVERY,
    ),
]
SignalsToHandle = Annotated[
    str,
    _torchrun(
        RECOVERY, "--signals-to-handle", "Each asks for a last save and the end; twice: at once.", metavar="SIG,..."
    ),
]
RankHeartbeat = Annotated[
    str | None,
    _ft(
        "--ft-rank-heartbeat-timeout",
        "Longest time between two calls of rt.heartbeat() in a script without rt.run; as heartbeat_limit_s.",
        RECOVERY,
        metavar="SECONDS",
    ),
]
FirstHeartbeat = Annotated[
    str | None,
    _ft(
        "--ft-initial-rank-heartbeat-timeout",
        "Longest time from the start to the first one; as first_heartbeat_limit_s.",
        RECOVERY,
        metavar="SECONDS",
    ),
]

# --- Output ----------------------------------------------------------------------------------------------------------

LogDir = Annotated[
    Path | None,
    _torchrun(OUTPUT, "--log-dir", "Where the ranks' output goes; else the run's logs/.", metavar="DIR"),
]
RdzvId = Annotated[
    str | None, _torchrun(OUTPUT, "--rdzv-id", "As --run-id; if that name is another job's, a new name is made of it.")
]
Redirects = Annotated[
    str,
    _torchrun(
        OUTPUT,
        "--redirects",
        "Only to the log, not to the console: 1 standard output, 2 error, 3 both; or per local rank, like 0:3,1:1.",
        "-r",
    ),
]
Tee = Annotated[str, _torchrun(OUTPUT, "--tee", "To the log and the console; that is the default.", "-t")]
LocalRanksFilter = Annotated[
    str,
    _torchrun(OUTPUT, "--local-ranks-filter", "Show these local ranks' output only.", metavar="RANK,..."),
]
DuplicateOut = Annotated[
    str,
    _torchrun(
        OUTPUT,
        "--duplicate-stdout-filters",
        "Lines with one of these words also go to filtered-stdout.log.",
        metavar="WORD,...",
    ),
]
DuplicateErr = Annotated[
    str,
    _torchrun(
        OUTPUT,
        "--duplicate-stderr-filters",
        "The same for standard error and filtered-stderr.log.",
        metavar="WORD,...",
    ),
]

# --- accepted, without a meaning here --------------------------------------------------------------------------------

MonitorInterval = Annotated[
    str | None, _torchrun(COMPATIBLE, "--monitor-interval", "Nothing is polled: deaths are events.", metavar="SECONDS")
]
StartMethod = Annotated[
    str | None,
    _torchrun(
        COMPATIBLE,
        "--start-method",
        "Ranks are forked where that is safe, else executed.",
        metavar="spawn|fork|forkserver",
    ),
]
LogsSpecs = Annotated[
    str | None, _torchrun(COMPATIBLE, "--logs-specs", "Logs are one file per rank and generation.", metavar="NAME")
]
EventLogHandler = Annotated[
    str | None, _torchrun(COMPATIBLE, "--event-log-handler", "Events are in the run's events/.", metavar="NAME")
]
RestartPolicy = Annotated[
    str | None,
    typer.Option(
        "--ft-restart-policy",
        metavar="any-failed|min-healthy",
        help="any-failed is what happens here.",
        rich_help_panel=COMPATIBLE,
    ),
]
WorkloadCheck = Annotated[
    str | None, _ft("--ft-workload-check-interval", "Heartbeats are looked at ten times a second.", metavar="SECONDS")
]
FtSafetyFactor = Annotated[str | None, _ft("--ft-safety-factor", "See hang_factor in --policy.", hidden=True)]
FtConfig = Annotated[str | None, typer.Option("--ft-cfg-path", hidden=True)]
FtNodeCheck = Annotated[str | None, _ft("--ft-node-health-check-interval", "", hidden=True)]
FtSignal = Annotated[str | None, _ft("--ft-rank-termination-signal", "", hidden=True)]
FtLogLevel = Annotated[str | None, _ft("--ft-log-level", "", hidden=True)]
FtOutOfSection = Annotated[str | None, _ft("--ft-rank-out-of-section-timeout", "", hidden=True)]
FtSections = Annotated[str | None, _ft("--ft-rank-section-timeouts", "", hidden=True)]
FtRestartCheck = Annotated[str | None, _ft("--ft-restart-check-interval", "", hidden=True)]
FtNic = Annotated[str | None, _ft("--ft-enable-nic-monitor", "", hidden=True)]
FtTopology = Annotated[str | None, _ft("--ft-pci-topo-file", "", hidden=True)]
FtLinkDown = Annotated[str | None, _ft("--ft-link-down-path-template", "", hidden=True)]
