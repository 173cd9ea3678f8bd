"""An agent whose coordinator is elsewhere."""

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
from ridethrough.launch.agent import NodeAgent
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.last_words import last_words
from ridethrough.launch.signals import StopSignals, stop_code
from ridethrough.launch.uplink import Uplink
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_FINISH_LIMIT_S = 120.0
_LOOK_S = 0.5

OpenRun = Callable[[str | None], RunDir]


class Member:
    """An agent whose coordinator is elsewhere."""

    def __init__(self, config: LaunchConfig, open_run: OpenRun, is_done: Callable[[], bool]) -> None:
        assert config.endpoint is not None
        self._config, self._open_run, self._is_done = config, open_run, is_done
        self._agent: NodeAgent | None = None
        self._starter: asyncio.Task[None] | None = None
        self._done: asyncio.Future[m.JobDone] = asyncio.get_running_loop().create_future()
        self._stop_agreed = False
        self._request: m.StopRequested | None = None
        self._stop = StopSignals(config, self._stop_requested)
        self._uplink = Uplink(
            *config.endpoint,
            config.token,
            tls=config.tls,
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
            if self._agent is not None:
                clean = done.code == 0 or self._stop_agreed
                done = await wind_up(self._agent, self._starter, done, self._stop, clean=clean)
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
        else:
            self._request = request
            self._pass_on(self._agent)

    def _pass_on(self, agent: NodeAgent) -> None:
        """The request to stop, if there was one: now, and to a coordinator that has come since."""
        request, grace_s = self._request, self._stop.grace_left_s()
        if request is not None and request.code == ExitCode.PREEMPTED:
            self._uplink.send(m.Notice(node=agent.node, cause=request.cause, grace_s=grace_s))
        elif request is not None:
            self._uplink.send(request.model_copy(update={"grace_s": grace_s}))

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
            self._starter.add_done_callback(lambda task: start_failed(task, self._done))
        else:
            self._agent.join()
            self._pass_on(self._agent)

    def _act(self, action: m.Action) -> None:
        if isinstance(action, m.JobDone):
            if not self._done.done():
                self._done.set_result(action)
        elif self._agent is not None:
            self._stop_agreed |= isinstance(action, m.StopAt)
            self._agent.perform(action)

    def _end_alone(self) -> None:
        """A notice, and nobody to agree on a last step with: what the keeper has in memory is saved."""
        assert self._stop.first is not None
        if self._agent is not None:
            self._agent.flush()
        code = stop_code(self._stop.first)
        self._done.set_result(m.JobDone(code=code, reason=f"{self._stop.first.name}, and no coordinator"))

    async def _watch_link(self, link: asyncio.Future[None]) -> None:
        """Without a coordinator the workers train on for a while, then are stopped; after `node_wait_s` more the agent
        ends."""
        policy = self._config.policy
        stopped = False
        while not self._done.done():
            await asyncio.wait([link], timeout=_LOOK_S)
            if link.done():  # refused, or the run's folder is another job's
                reason = self._uplink.refused or str(link.exception())
                self._done.set_result(m.JobDone(code=ExitCode.USAGE, reason=reason))
                return
            since_s = self._uplink.lost_since_s
            lost_s = time.monotonic() - since_s if since_s is not None else 0.0
            if lost_s == 0.0:
                stopped = False
            elif self._agent is None and not self._config.may_host and self._is_done():
                reason = "the job was done before this machine came"
                print(f"ridethrough: {reason}", file=sys.stderr)
                self._done.set_result(m.JobDone(code=ExitCode.DONE, reason=reason))
            elif lost_s > (policy.coordinator_wait_s + policy.node_wait_s if self._agent else policy.join_limit_s):
                host, port = self._uplink.endpoint
                reason = (
                    f"the coordinator at {host}:{port} was not reachable for {lost_s:.0f} s: {self._uplink.trouble}"
                )
                self._done.set_result(m.JobDone(code=ExitCode.RESTARTS_EXHAUSTED, reason=reason))
            elif self._stop.first is not None and self._stop.grace_left_s() == 0.0:
                self._end_alone()
            elif lost_s > policy.coordinator_wait_s and not stopped and self._agent is not None:
                stopped = True
                self._agent.abandon_workers("the coordinator is not reachable")


async def wind_up(
    agent: NodeAgent, starter: asyncio.Task[None] | None, done: m.JobDone, stop: StopSignals, *, clean: bool
) -> m.JobDone:
    """Ends an agent: after a clean end once the ranks have finished, else after what is left of the grace. `starter` is
    its `start`, None if it was refused before. Returns how the job has ended after all: a rank may have failed behind
    the training function."""
    if starter is not None:
        starter.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # how it failed is in `done` (`start_failed`)
            await starter
    agent.release(done.code)
    if clean:
        limit_s = _FINISH_LIMIT_S if stop.first is None else max(1.0, stop.grace_left_s())
        await agent.wait_workers(limit_s, stop.again)
    grace_s = 2.0 if clean else max(1.0, stop.grace_left_s())
    await agent.stop(grace_s, sig=stop.first or signal.SIGTERM, again=stop.again)
    if done.code == ExitCode.DONE and agent.failed_late is not None:
        return m.JobDone(code=ExitCode.NO_PROGRESS, reason=agent.failed_late)
    return done


def start_failed(task: asyncio.Task[None], done: asyncio.Future[m.JobDone]) -> None:
    """For the task that starts an agent: its failure is the end."""
    if not task.cancelled() and task.exception() is not None and not done.done():
        done.set_result(m.JobDone(code=1, reason=f"the agent could not start: {task.exception()}"))
