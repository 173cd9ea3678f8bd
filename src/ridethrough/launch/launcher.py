"""One launch on one machine: an agent, and the coordinator with it where this is the place for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.machine import GenerationMachine
from ridethrough.launch.agent import NodeAgent
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.endpoint import EndpointError, settle
from ridethrough.launch.epoch import claim_epoch
from ridethrough.launch.last_words import last_words
from ridethrough.launch.server import CoordinatorServer
from ridethrough.launch.signals import StopSignals
from ridethrough.launch.uplink import Uplink
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_FINISH_LIMIT_S = 120.0
_GOODBYE_LIMIT_S = 20.0
_LOOK_S = 0.5

OpenRun = Callable[[str | None], RunDir]


def launch(config: LaunchConfig, open_run: OpenRun) -> int:
    """Runs this node's part of the job to its end; returns the exit code (see `ridethrough exit-codes`).

    `open_run(id)` makes the run's folder; the id is None unless a coordinator elsewhere has named it. Main thread
    only: it takes over the configured signals and SIGCHLD while it runs. Ctrl-C once or SIGTERM: a last save and a
    planned end; twice: at once. With an endpoint, the first agent that can listen on it hosts the coordinator; the
    others, and all of them if `ridethrough coordinator` listens there, connect to it.
    """
    try:
        return asyncio.run(_launch(config, open_run))
    except KeyboardInterrupt:  # before the signals were taken over
        return 128 + signal.SIGINT


async def _launch(config: LaunchConfig, open_run: OpenRun) -> int:
    if config.endpoint is None:
        return await _host(config, open_run)
    limit_s = config.policy.join_limit_s
    try:
        part = await settle(*config.endpoint, may_host=config.may_host, must_host=config.must_host, limit_s=limit_s)
    except EndpointError as error:
        print(f"ridethrough: {error}", file=sys.stderr)
        return error.code
    return await (_host(config, open_run) if part == "host" else _Member(config, open_run).run())


async def _host(config: LaunchConfig, open_run: OpenRun) -> int:
    """Coordinator and agent in one process: their common end is documented as the end of the job."""
    run = open_run(None)
    recorder = Recorder(run.path, "agent")
    machine = GenerationMachine(
        num_workers=config.num_workers,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        policy=config.policy,
        epoch=claim_epoch(run.path),
    )
    coordinator = Coordinator(machine, recorder, run.path)
    address = config.address or (config.endpoint[0] if config.endpoint is not None else "127.0.0.1")
    agent = NodeAgent(config, run, recorder, coordinator.post, address)
    server: CoordinatorServer | None = None
    if config.endpoint is not None:
        server = CoordinatorServer(coordinator, config.token, welcome(config, run, machine), config.policy.lease_s)
        await server.start(*config.endpoint)
    coordinator.deliver = _deliver(agent, server)
    slots = config.num_workers * config.max_nodes
    recorder.emit("job_start", slots=slots, nodes=config.max_nodes, run_id=run.run_id, policy=config.policy.changed())
    stop = StopSignals(config, coordinator.post)
    with stop.handled():
        starter = asyncio.ensure_future(agent.start())
        starter.add_done_callback(lambda task: _start_failed(task, coordinator.done))
        ticker = asyncio.ensure_future(_tick_after(starter, coordinator))
        done = await coordinator.done
        ticker.cancel()
        await _wind_up(agent, starter, done, stop, clean=done.code == 0 or machine.stop_agreed)
        if server is not None:
            await server.stop(done, _GOODBYE_LIMIT_S)
    recorder.emit("job_end", code=done.code, reason=done.reason)
    run.finish(done.code, done.reason)
    last_words(coordinator.last_incident, done)
    return done.code


class _Member:
    """An agent whose coordinator is elsewhere."""

    def __init__(self, config: LaunchConfig, open_run: OpenRun) -> None:
        assert config.endpoint is not None
        self._config, self._open_run = config, open_run
        self._agent: NodeAgent | None = None
        self._starter: asyncio.Task[None] | None = None
        self._done: asyncio.Future[m.JobDone] = asyncio.get_running_loop().create_future()
        self._stop_agreed = False
        self._stop = StopSignals(config, self._stop_requested)
        self._uplink = Uplink(
            *config.endpoint,
            config.token,
            on_welcome=self._welcomed,
            hello=self._hello,
            on_unknown=self._unknown,
            on_action=self._act,
        )

    async def run(self) -> int:
        link = asyncio.ensure_future(self._uplink.run())
        watch = asyncio.ensure_future(self._watch_link(link))
        with self._stop.handled():
            done = await self._done
            watch.cancel()
            if self._agent is not None and self._starter is not None:
                clean = done.code == 0 or self._stop_agreed
                await _wind_up(self._agent, self._starter, done, self._stop, clean=clean)
        link.cancel()
        await self._uplink.close()
        last_words(None, done)
        return done.code

    def _stop_requested(self, request: m.StopRequested) -> None:
        """A machine that is to be taken away leaves, and the others go on; Ctrl-C is for the whole job."""
        if self._done.done():
            return
        if self._agent is None or self._stop.again.is_set():
            self._done.set_result(m.JobDone(code=request.code, reason=f"stopped by {request.cause}"))
        elif request.code == ExitCode.PREEMPTED:
            self._uplink.send(m.Notice(node=self._agent.node, cause=request.cause, grace_s=request.grace_s))
        else:
            self._uplink.send(request)

    def _welcomed(self, welcome: dict[str, Any], address: str) -> None:
        if self._agent is None:
            run = self._open_run(welcome["run_id"])
            address = self._config.address or address
            recorder = Recorder(run.path, "agent")
            self._agent = NodeAgent(self._config, run, recorder, self._uplink.send, address)

    def _hello(self) -> dict[str, Any]:
        assert self._agent is not None
        return {"node": self._agent.node, "name": self._agent.name, "num_workers": self._config.num_workers}

    def _unknown(self) -> None:
        assert self._agent is not None
        if self._starter is None:
            self._starter = asyncio.ensure_future(self._agent.start())
            self._starter.add_done_callback(lambda task: _start_failed(task, self._done))
        else:
            self._agent.join()

    def _act(self, action: m.Action) -> None:
        if isinstance(action, m.JobDone):
            if not self._done.done():
                self._done.set_result(action)
        elif self._agent is not None:
            self._stop_agreed |= isinstance(action, m.StopAt)
            self._agent.perform(action)

    async def _watch_link(self, link: asyncio.Future[None]) -> None:
        """Without a coordinator the workers train on for a while, then are stopped; after `node_wait_s` more the agent
        ends."""
        policy = self._config.policy
        stopped = False
        while not self._done.done():
            await asyncio.wait([link], timeout=_LOOK_S)
            if self._uplink.refused:
                self._done.set_result(m.JobDone(code=2, reason=self._uplink.refused))
                return
            since_s = self._uplink.lost_since_s
            lost_s = time.monotonic() - since_s if since_s is not None else 0.0
            if lost_s == 0.0:
                stopped = False
            elif lost_s > (policy.coordinator_wait_s + policy.node_wait_s if self._agent else policy.join_limit_s):
                host, port = self._uplink.endpoint
                reason = (
                    f"the coordinator at {host}:{port} was not reachable for {lost_s:.0f} s: {self._uplink.trouble}"
                )
                self._done.set_result(m.JobDone(code=80, reason=reason))
            elif lost_s > policy.coordinator_wait_s and not stopped and self._agent is not None:
                stopped = True
                self._agent.abandon_workers("the coordinator is not reachable")


def welcome(config: LaunchConfig, run: RunDir, machine: GenerationMachine) -> dict[str, Any]:
    """What a coordinator tells an agent that has proved itself."""
    return {"epoch": machine.epoch, "run_id": run.run_id, "num_workers": config.num_workers}


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


async def _wind_up(
    agent: NodeAgent, starter: asyncio.Task[None], done: m.JobDone, stop: StopSignals, *, clean: bool
) -> None:
    starter.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await starter
    agent.release(done.code)
    if clean:
        limit_s = _FINISH_LIMIT_S if stop.first is None else max(1.0, stop.grace_left_s())
        await agent.wait_workers(limit_s, stop.again)
    grace_s = 2.0 if clean else max(1.0, stop.grace_left_s())
    await agent.stop(grace_s, sig=stop.first or signal.SIGTERM, again=stop.again)


def _start_failed(task: asyncio.Task[None], done: asyncio.Future[m.JobDone]) -> None:
    if not task.cancelled() and task.exception() is not None and not done.done():
        done.set_result(m.JobDone(code=1, reason=f"the agent could not start: {task.exception()}"))
