"""One launch on one machine: coordinator and agent in one process, until the job is done."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from ridethrough.generation import messages as m
from ridethrough.generation.machine import GenerationMachine
from ridethrough.launch.agent import NodeAgent
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.coordinator import Coordinator
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_FINISH_LIMIT_S = 120.0


def launch(config: LaunchConfig, run: RunDir) -> int:
    """Runs the job to its end; returns the exit code (see `ridethrough exit-codes`). Main thread only: it takes over
    SIGINT, SIGTERM and SIGCHLD while it runs. Ctrl-C once or SIGTERM: a last save and a planned end; twice: at once.
    """
    return asyncio.run(_launch(config, run))


async def _launch(config: LaunchConfig, run: RunDir) -> int:
    recorder = Recorder(run.path, "agent")
    machine = GenerationMachine(num_workers=config.num_workers, policy=config.policy)
    coordinator = Coordinator(machine, recorder)
    agent = NodeAgent(config, run, recorder, coordinator.post)
    coordinator.deliver = lambda node, action: agent.perform(action)
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, _on_signal, sig, config, coordinator)
    recorder.emit("job_start", slots=config.num_workers, nodes=1, run_id=run.run_id)
    ticker = asyncio.ensure_future(coordinator.tick())
    starter = asyncio.ensure_future(agent.start())
    starter.add_done_callback(lambda task: _start_failed(task, coordinator))
    done = await coordinator.done
    starter.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await starter
    ticker.cancel()
    clean = done.code == 0 or machine.stop_agreed
    agent.release(done.code)
    if clean:
        await agent.wait_workers(_FINISH_LIMIT_S)
    await agent.stop(2.0 if clean else 1.0)
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(sig)
    recorder.emit("job_end", code=done.code, reason=done.reason)
    run.finish(done.code, done.reason)
    _last_words(coordinator, done)
    return done.code


def _on_signal(sig: signal.Signals, config: LaunchConfig, coordinator: Coordinator) -> None:
    code = 82 if sig == signal.SIGTERM else 128 + sig
    grace_s = config.policy.stop_grace_s
    print(f"ridethrough: {sig.name}: a last save, then the end (again: at once)", file=sys.stderr, flush=True)
    coordinator.post(m.StopRequested(cause=sig.name, code=code, grace_s=grace_s))


def _start_failed(task: asyncio.Task[None], coordinator: Coordinator) -> None:
    if task.cancelled() or task.exception() is None or coordinator.done.done():
        return
    coordinator.done.set_result(m.JobDone(code=1, reason=f"the agent could not start: {task.exception()}"))


def _last_words(coordinator: Coordinator, done: m.JobDone) -> None:
    """The root cause is the last thing printed."""
    incident = coordinator.last_incident
    if done.code == 0:
        return
    out = [f"ridethrough: ended with code {done.code}: {done.reason}"]
    if incident is not None and incident.rung == "give_up":
        root = incident.root
        out += [f"  {r.rank=} {r.fault_class}: {_first_line(r.cause)} (secondary)" for r in incident.secondary]
        where = f"rank {root.rank} on {root.node}, phase {root.phase or '?'}, step {root.step}"
        out += [f"root cause: {where}: {root.cause}"]
        if root.traceback:
            out += [root.traceback.rstrip()]
    print("\n".join(out), file=sys.stderr, flush=True)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
