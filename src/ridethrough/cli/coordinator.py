"""`ridethrough coordinator`: membership, plans and policy of one job, on a machine that does not train."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from ridethrough.cli import launching as la
from ridethrough.cli import run_options as ro
from ridethrough.cli.command import App
from ridethrough.cli.policy_file import PolicyFile, read_policy
from ridethrough.cli.usage import fail, usage_errors
from ridethrough.ledger.rundir import RunDir, RunDirError, create_run, runs_root

app = App()


@app.command()
def coordinator(
    ctx: typer.Context,
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where it listens for agents.")] = (
        "127.0.0.1:29500"
    ),
    nnodes: ro.Nnodes = "1",
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on each machine.")] = 1,
    token_file: ro.TokenFile = None,
    tls_cert: la.TlsCert = None,
    tls_key: la.TlsKey = None,
    tls_ca: la.TlsCa = None,
    max_restarts: ro.MaxRestarts = 100,
    stop_grace: ro.StopGrace = 10.0,
    node_wait: ro.NodeWait = 300.0,
    lease: ro.Lease = 5.0,
    policy_file: PolicyFile = None,
    runs: la.Runs = None,
    run_id: la.RunId = None,
) -> None:
    """Run the coordinator alone. Agents join with `ridethrough run --rdzv-endpoint HOST:PORT ...`.

    It may be killed and started again with the same run: it claims a new epoch, hears from the agents where they are,
    and training goes on without a restart. Its run folder must survive it (a volume, for a pod). SIGTERM, as in a
    rolling update, ends it alone, with code 143; Ctrl-C ends the job. Else it ends with the job's exit code.

    Example:

        ridethrough coordinator --bind 0.0.0.0:29500 --nnodes 2:4 --nproc-per-node 8 --token-file job.token --run-id a
    """
    from ridethrough.generation.handshake import read_token
    from ridethrough.launch.config import LaunchConfig
    from ridethrough.launch.solo import coordinate
    from ridethrough.launch.tls import read_tls

    with usage_errors(ValueError):
        least, most = la.node_range(nnodes)
        endpoint = la.host_and_port("--bind", bind, 29500)
        token = read_token(token_file)
        tls = read_tls(tls_cert, tls_key, tls_ca)
    if not token:
        fail("the coordinator needs the job's token: --token-file FILE, made by `openssl rand -hex 32 > FILE`")
    config = LaunchConfig(
        command=[],
        num_workers=nproc_per_node,
        min_nodes=least,
        max_nodes=most,
        endpoint=endpoint,
        token=token,
        tls=tls,
        signals=(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        policy=read_policy(ctx, policy_file),
    )

    def open_run() -> RunDir:
        return create_run(runs_root(runs), run_id=run_id, config={}, command=sys.argv, schedule_hash=None)

    with usage_errors(RunDirError):
        code = coordinate(config, open_run())
    raise typer.Exit(code)
