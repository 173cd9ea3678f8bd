"""One launch on one machine: an agent, and the coordinator with it where this is the place for it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable

from ridethrough.generation import messages as m
from ridethrough.launch.agent import NodeAgent
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.endpoint import EndpointError, settle
from ridethrough.launch.hosting import GOODBYE_LIMIT_S, HostedJob
from ridethrough.launch.member import Member, OpenRun, start_failed, wind_up
from ridethrough.launch.server import CoordinatorServer
from ridethrough.launch.signals import StopSignals


def launch(config: LaunchConfig, open_run: OpenRun, is_done: Callable[[], bool]) -> int:
    """Runs this node's part of the job to its end; returns the exit code (see `ridethrough exit-codes`).

    `open_run(id)` makes the run's folder; the id is None unless a coordinator elsewhere has named it. `is_done()` says
    whether others have finished the run already: who may only join then has nothing to wait for. Main thread
    only: it takes over the configured signals and SIGCHLD while it runs. Ctrl-C once or SIGTERM: a last save and a
    planned end; twice: at once. With an endpoint, the first agent that can listen on it hosts the coordinator; the
    others, and all of them if `ridethrough coordinator` listens there, connect to it.
    """
    try:
        return asyncio.run(_launch(config, open_run, is_done))
    except KeyboardInterrupt:  # before the signals were taken over
        return 128 + signal.SIGINT


async def _launch(config: LaunchConfig, open_run: OpenRun, is_done: Callable[[], bool]) -> int:
    if config.endpoint is None:
        return await _host(config, open_run)
    if config.may_host:
        limit_s = config.policy.join_limit_s
        try:
            listening = await settle(*config.endpoint, must_host=config.must_host, limit_s=limit_s, tls=config.tls)
        except EndpointError as error:
            print(f"ridethrough: {error}", file=sys.stderr)
            return error.code
        if listening is not None:
            return await _host(config, open_run, listening)
    return await Member(config, open_run, is_done).run()


async def _host(config: LaunchConfig, open_run: OpenRun, listening: socket.socket | None = None) -> int:
    """Coordinator and agent in one process: their common end is documented as the end of the job."""
    run = open_run(None)
    job = HostedJob(config, run, "agent")
    address = config.address or (config.endpoint[0] if config.endpoint is not None else "127.0.0.1")
    agent = NodeAgent(config, run, job.recorder, job.coordinator.post, address)
    if listening is not None:
        await job.listen(listening)
    job.coordinator.deliver = _deliver(agent, job.server)
    job.begin()
    done = job.coordinator.done
    stop = StopSignals(config, job.coordinator.post)
    with stop.handled():
        starter = asyncio.ensure_future(agent.start())
        starter.add_done_callback(lambda task: start_failed(task, done))
        ticker = asyncio.ensure_future(_tick_after(starter, job.coordinator))
        ended = await done
        ticker.cancel()
        ended = await wind_up(agent, starter, ended, stop, clean=ended.code == 0 or job.machine.stop_agreed)
        if job.server is not None and not job.coordinator.deposed:
            await job.server.stop(ended, GOODBYE_LIMIT_S)
    return job.end(ended)


async def _tick_after(starter: asyncio.Task[None], coordinator: Coordinator) -> None:
    """Time begins when this node's agent is ready: importing torch is no part of the time to wait for nodes."""
    await asyncio.wait([starter])
    await coordinator.tick()


def _deliver(agent: NodeAgent, server: CoordinatorServer | None) -> Callable[[str, m.Action], None]:
    def deliver(node: str, action: m.Action) -> None:
        if node == agent.node:
            agent.perform(action)
        elif server is not None:
            server.deliver(node, action)

    return deliver
