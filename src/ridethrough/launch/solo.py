"""The coordinator in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from ridethrough.generation.exit_codes import ExitCode
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.hosting import GOODBYE_LIMIT_S, HostedJob
from ridethrough.launch.signals import StopSignals
from ridethrough.ledger.rundir import RunDir

_LINGER_S = 2.0


def coordinate(config: LaunchConfig, run: RunDir) -> int:
    """Serves until the job is done; returns its exit code, 2 if the port is taken. Main thread only.

    SIGTERM is for this process, not for the job: it ends with 128 + 15, the agents train on and look for the next
    coordinator. Ctrl-C is for the job: a last save, then the end.
    """
    return asyncio.run(_coordinate(config, run))


async def _coordinate(config: LaunchConfig, run: RunDir) -> int:
    assert config.endpoint is not None
    job = HostedJob(config, run, "coordinator")
    try:
        port = await job.listen()
    except OSError as error:
        print(f"ridethrough: --bind {config.endpoint[0]}:{config.endpoint[1]}: {error.strerror}", file=sys.stderr)
        return ExitCode.USAGE
    assert job.server is not None
    job.coordinator.deliver = job.server.deliver
    _say(f"run {run.run_id}, epoch {job.machine.epoch}, listening on {config.endpoint[0]}:{port}")
    if job.machine.epoch == 0:
        job.begin()
    ticker = asyncio.ensure_future(job.coordinator.tick())
    with StopSignals(config, job.coordinator.post).handled():
        replaced = await _done_or_replaced(job)
        ticker.cancel()
        if replaced:
            _say(f"{replaced}; the job goes on")
            return 128 + signal.SIGTERM
        done = job.coordinator.done.result()
        await job.server.stop(done, GOODBYE_LIMIT_S)
    return job.end(done)


async def _done_or_replaced(job: HostedJob) -> str:
    """Waits for the job's end (empty), or for the end of this process's part in it (why)."""
    coordinator, loop = job.coordinator, asyncio.get_running_loop()
    moved = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, moved.set)
    coordinator.done.add_done_callback(lambda done: moved.set())
    try:
        await moved.wait()
        if not coordinator.done.done():  # a job that is taken down as a whole hears of it at its nodes at the same time
            await asyncio.wait([coordinator.done], timeout=_LINGER_S)
            if not coordinator.done.done() and not job.machine.stopping:
                return "SIGTERM"
            await coordinator.done
        return coordinator.deposed
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"ridethrough coordinator: {line}", file=sys.stderr, flush=True)
