"""The coordinator in a process of its own."""

from __future__ import annotations

import asyncio
import sys

from ridethrough.generation.machine import GenerationMachine
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.epoch import claim_epoch
from ridethrough.launch.last_words import last_words
from ridethrough.launch.launcher import welcome
from ridethrough.launch.server import CoordinatorServer
from ridethrough.launch.signals import StopSignals
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_GOODBYE_LIMIT_S = 20.0


def coordinate(config: LaunchConfig, run: RunDir) -> int:
    """Serves until the job is done; returns its exit code, 2 if the port is taken. Main thread only."""
    return asyncio.run(_coordinate(config, run))


async def _coordinate(config: LaunchConfig, run: RunDir) -> int:
    assert config.endpoint is not None
    recorder = Recorder(run.path, "coordinator")
    machine = GenerationMachine(
        num_workers=config.num_workers,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        policy=config.policy,
        epoch=claim_epoch(run.path),
    )
    coordinator = Coordinator(machine, recorder, run.path)
    server = CoordinatorServer(coordinator, config.token, welcome(config, run, machine), config.policy.lease_s)
    coordinator.deliver = server.deliver
    try:
        port = await server.start(*config.endpoint)
    except OSError as error:
        print(f"ridethrough: --bind {config.endpoint[0]}:{config.endpoint[1]}: {error.strerror}", file=sys.stderr)
        return 2
    print(
        f"ridethrough coordinator: run {run.run_id}, epoch {machine.epoch}, listening on {config.endpoint[0]}:{port}",
        file=sys.stderr,
        flush=True,
    )
    if machine.epoch == 0:
        slots = config.num_workers * config.max_nodes
        policy = config.policy.changed()
        recorder.emit("job_start", slots=slots, nodes=config.max_nodes, run_id=run.run_id, policy=policy)
    ticker = asyncio.ensure_future(coordinator.tick())
    with StopSignals(config, coordinator.post).handled():
        done = await coordinator.done
        ticker.cancel()
        await server.stop(done, _GOODBYE_LIMIT_S)
    recorder.emit("job_end", code=done.code, reason=done.reason)
    run.finish(done.code, done.reason)
    last_words(coordinator.last_incident, done)
    return done.code
