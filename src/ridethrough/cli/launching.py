"""What `run`, `train` and `demo` share: their launch options, and the start of one job."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridethrough.cli.usage import usage_errors
from ridethrough.faults import injector
from ridethrough.ledger.rundir import RunDir, RunDirError, check_run_id, config_hash, create_run, is_done, runs_root

if TYPE_CHECKING:
    from ridethrough.faults.schedule import Schedule
    from ridethrough.launch.config import LaunchConfig

_LAUNCH = "Launch"
_NODES = "Several machines"
_RUN = "Run folder and output"
_RECOVERY = "Recovery"

TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="TLS between agents and coordinator: this machine's certificate (PEM).",
        rich_help_panel=_NODES,
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key (PEM).", rich_help_panel=_NODES)
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="The CA of every machine's, and of nobody else's.", rich_help_panel=_NODES
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs", metavar="DIR", help="Where runs are kept; else RIDETHROUGH_RUNS, else ./runs.", rich_help_panel=_RUN
    ),
]


def usable_run_id(value: str | None) -> str | None:
    """For the option --run-id: an id that cannot name a folder is refused before anything is started."""
    if value is not None:
        with usage_errors(RunDirError):
            check_run_id(value)
    return value


RunId = Annotated[
    str | None,
    typer.Option(
        "--run-id",
        "--rdzv-id",
        callback=usable_run_id,
        metavar="ID",
        help="Name of the run; the same name and settings go on where the run ended.",
        rich_help_panel=_RUN,
    ),
]
OnlyRunId = Annotated[
    str | None,
    typer.Option(
        "--run-id",
        callback=usable_run_id,
        metavar="ID",
        help="Name of the run; the same name and settings go on where the run ended.",
        rich_help_panel=_RUN,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Do not show the ranks' output; it is in the run's logs/.", rich_help_panel=_RUN),
]


def num_workers(text: str) -> int:
    """The number behind `--nproc-per-node`. Raises ValueError, one line with the remedy."""
    import os

    if text in ("gpu", "xpu", "auto", "cpu"):
        num_gpus = 0
        if text != "cpu":
            import torch

            num_gpus = torch.xpu.device_count() if text == "xpu" else torch.cuda.device_count()
            if text != "auto" and not num_gpus:
                raise ValueError(f"--nproc-per-node {text}: this machine has none that torch can use; give a number")
        return num_gpus or os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--nproc-per-node {text}: give a number of at least 1, gpu, cpu or auto")
    return int(text)


def node_range(text: str) -> tuple[int, int]:
    """`--nnodes MIN:MAX` or a number. Raises ValueError, one line with the remedy."""
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise ValueError(f"--nnodes {text}: give a number of at least 1, or MIN:MAX")
    return int(least), int(most or least)


def host_and_port(flag: str, text: str, default_port: int) -> tuple[str, int]:
    """HOST[:PORT]. Raises ValueError, one line with the remedy."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(default_port)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{flag} {text}: give HOST:PORT, like node0.example:29500")
    return host, int(port)


def check_machine(workers: int) -> None:
    """Raises ValueError if this machine can't hold so many ranks: each needs about 300 MB for torch alone."""
    from ridethrough.health.cgroup import available_memory_bytes

    free = available_memory_bytes()
    need = workers * 300_000_000
    if free is not None and need > free:
        raise ValueError(
            f"{workers} ranks need about {need / 1e9:.1f} GB for torch alone, {free / 1e9:.1f} GB are free: "
            "use fewer ranks"
        )


def start_job(
    launch_config: LaunchConfig,
    *,
    config: dict[str, Any],
    runs: Path | None,
    run_id: str | None,
    schedule: Schedule | None,
    rdzv_id: str | None = None,
) -> int:
    """Makes the run folder, launches the job and returns its exit code. Exits with 2 if the folder can't be used.

    `config` identifies the job: a run folder belongs to one config for ever. `rdzv_id` names the run if nothing else
    does; where that name is another job's (torchrun's users give the same id to many jobs) a new one is made of it.
    """
    from ridethrough.launch.launcher import launch

    def create(name: str | None) -> RunDir:
        return create_run(
            runs_root(runs),
            run_id=name,
            config=config,
            command=sys.argv,
            schedule_hash=schedule.hash if schedule is not None else None,
        )

    def open_run(named: str | None) -> RunDir:
        run = _named_after(rdzv_id, config, create) if rdzv_id and not (run_id or named) else create(run_id or named)
        if rdzv_id:
            launch_config.env["TORCHELASTIC_RUN_ID"] = rdzv_id
        launch_config.env.update(_fault_environment(run, schedule))
        return run

    def done() -> bool:
        return run_id is not None and is_done(runs_root(runs) / run_id, config)

    with usage_errors(RunDirError):
        return launch(launch_config, open_run, done)


def _named_after(rdzv_id: str, config: dict[str, Any], create: Callable[[str | None], RunDir]) -> RunDir:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", rdzv_id).lstrip("._-")[:80] or "run"
    try:
        return create(name)
    except RunDirError:
        return create(f"{name}.{config_hash(config)[:8]}")


def _fault_environment(run: RunDir, schedule: Schedule | None) -> dict[str, str]:
    if schedule is None:
        return {}
    path = run.path / "faults.json"
    if not path.exists():
        schedule.save(path)
    return injector.environment(schedule, path)
