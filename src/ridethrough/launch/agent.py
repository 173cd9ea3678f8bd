"""The node agent: carries out for its node what the generation machine decides, and reports what happens there.

One asyncio loop in the agent's main thread. It owns the node's helpers (zygote, spares, keeper, store) and its worker
processes (`crew`), hears the workers (`worker_link`) and watches their heartbeat pages (`watch`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import socket
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.plan import NodePlan
from ridethrough.generation.socket_folder import hold, socket_folder
from ridethrough.launch import linux
from ridethrough.launch.compaction import keep_compact
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.crew import Crew
from ridethrough.launch.environment import worker_environment
from ridethrough.launch.evidence import Evidence
from ridethrough.launch.keeper import KeeperProcess
from ridethrough.launch.numa import cores_of_ranks
from ridethrough.launch.store import StoreError, StoreHost
from ridethrough.launch.watch import Watch
from ridethrough.launch.worker_link import WorkerLink
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_SILENT_LOOK_S = 0.5


class NodeAgent:
    """`report(event)` takes what happens to the machine; `perform(action)` does what the machine says.

    `start` begins the node's helpers, `stop` ends every process and removes every file that this agent made. All
    methods run in the main thread.
    """

    def __init__(
        self, config: LaunchConfig, run: RunDir, recorder: Recorder, report: Callable[[m.Event], None], address: str
    ) -> None:
        self.name = config.node_name or socket.gethostname()
        self.node = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self.config = config
        self.run = run
        self._recorder = recorder
        self._report = report
        self._folder = socket_folder()
        self._held = hold(self._folder)
        job = uuid.uuid4().hex
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = StoreHost(address, config.master_port)
        self._crew = Crew(
            config,
            self.node,
            folder=self._folder,
            logs=config.log_dir or run.logs_dir,
            mark=f"RIDETHROUGH_JOB={job}",
            env=worker_environment(config, run, self._folder, job, address),
            report=report,
            record=functools.partial(recorder.emit, node=self.node),
            spawn_task=self._spawn_task,
            before_death=self._tell_progress,
            after_death=lambda worker: self._evidence.keep_now(worker, self._epoch),
        )
        several = config.max_nodes > 1 and bool(config.token)
        self._keeper = KeeperProcess(
            self._folder / "keeper.sock",
            run,
            grace_s=config.policy.stop_grace_s,
            env=config.env,
            address=address if several else "",
            token=config.token,
            replicas=config.replicas,
            rate=config.replica_rate,
        )
        workers = self._crew.workers
        self._evidence = Evidence(run.incidents_dir, self.node, workers)
        self._watch = Watch(config.policy, self.node, workers, report, recorder.emit, self._take_stacks)
        self._link = WorkerLink(self.node, workers, self._watch, report, self._crew.kill)
        self._started = self._stopping = False
        self._plan: NodePlan | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts zygote, keeper, link and watch; returns once workers can be started."""
        linux.become_subreaper()
        await self._link.open(self._folder / "agent.sock")
        self._keeper.start()
        await asyncio.gather(self._crew.open(), asyncio.to_thread(__import__, "torch.distributed"))
        if self.config.numa_binding:
            self._crew.cores = await cores_of_ranks(self.config.numa_binding, self.config.num_workers)
        # Not before: the process that tells of the cores is waited for by asyncio, which would find it reaped.
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_adopted)
        self._reap_adopted()
        for loop in (self._watch.loop(), self._end_silent(), keep_compact(self.run)):
            self._spawn_task(loop)
        self._started = True
        self.join()

    def join(self) -> None:
        """Tells the machine that this node is there; to a coordinator that has just been started again, what it is."""
        if not self._started:
            return
        if self._plan is None:
            self.abandon_workers("a coordinator that knows none of them starts its own")
            size, place = self.config.num_workers, self.config.place
            self._report(m.NodeJoined(node=self.node, name=self.name, num_workers=size, place=place))
            return
        workers = tuple(
            m.WorkerSnapshot(worker=w.id, local_rank=w.local_rank, state=w.state, attached=w.writer is not None)
            for w in self._crew.slots.values()
            if not w.gone.is_set()
        )
        self._report(m.NodeRejoined(node=self.node, name=self.name, plan=self._plan, workers=workers))

    def flush(self) -> None:
        """Has the newest state that only memory holds written."""
        self._keeper.flush()

    def abandon_workers(self, why: str) -> None:
        """Ends every worker; the keeper with its snapshots stays."""
        for worker in list(self._crew.workers.values()):
            self._crew.kill(worker, why)

    def release(self, code: int) -> None:
        """The job is over: workers that wait in `rt.run` go on behind it."""
        for worker in self._crew.slots.values():
            worker.released = worker.writer is not None
        self._broadcast({"t": "done", "code": code})

    @property
    def failed_late(self) -> str | None:
        """What a rank failed of behind the training function: the machine was done by then."""
        return self._crew.failed_late

    async def wait_workers(self, limit_s: float, again: asyncio.Event) -> None:
        """Waits until every released worker has ended by itself, for `limit_s` at most, or until `again` is set."""
        await self._crew.wait(limit_s, again)

    async def stop(self, grace_s: float, *, sig: int = signal.SIGTERM, again: asyncio.Event | None = None) -> None:
        """Ends what still runs: `sig`, `grace_s` seconds or until `again` is set, then SIGKILL to whole trees. Leaves
        nothing behind."""
        self._stopping = True
        await self._crew.end(grace_s, sig, again)
        for task in list(self._tasks):
            task.cancel()
        self._recorder.emit(
            "intervals", longest_s=self._watch.intervals(), deadline_s=self._watch.judge.step_deadline_s()
        )
        self._link.close()
        await self._keeper.stop(again)
        self._crew.close()
        self._store.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._held)

    # --- what the machine says -------------------------------------------------------------------------------------

    def perform(self, action: m.Action) -> None:
        """Carries out one action for this node; never blocks. What takes time reports its end as an event."""
        if isinstance(action, m.Spawn):
            self._spawn_task(self._crew.start(action))
        elif isinstance(action, m.OpenStore):
            self._spawn_task(self._open_store(action.serial))
        elif isinstance(action, m.Enter):
            self._enter(action)
        elif isinstance(action, m.Leave):
            self._watch.generation_ends()
            self._evidence.take(self._epoch, action.generation)
            self._broadcast({"t": "leave", "generation": action.generation, "why": action.why})
        elif isinstance(action, m.Kill):
            worker = self._crew.workers.get(action.worker)
            if worker is not None:
                self._crew.kill(worker, action.why)
        elif isinstance(action, m.AskStep):
            self._broadcast({"t": "ask_step", "generation": action.generation, "cause": action.cause})
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.policy.stop_grace_s / 3, self._flush_if_stuck, action.generation)
        elif isinstance(action, m.StopAt):
            self._broadcast({"t": "stop_at", "generation": action.generation, "step": action.step})
        elif isinstance(action, m.Inspect):
            situations = self._watch.situations()
            self._report(m.Inspected(node=self.node, generation=action.generation, situations=situations))

    def _enter(self, action: m.Enter) -> None:
        plan = action.plan
        self._plan = plan
        master, _, port = plan.store.rpartition(":")
        self._watch.generation_begins(plan.generation, plan.world_size)
        for local_rank, name in enumerate(plan.workers):
            worker = self._crew.workers.get(name)
            if worker is None:
                continue
            worker.rank, worker.generation, worker.state = plan.first_rank + local_rank, plan.generation, "entering"
            worker.log.switch(plan.generation, worker.rank)
            self._link.send(
                worker,
                {
                    "t": "plan",
                    "epoch": plan.epoch,
                    "generation": plan.generation,
                    "rank": worker.rank,
                    "local_rank": 0 if self.config.virtual_local_rank else local_rank,
                    "world_size": plan.world_size,
                    "local_world_size": len(plan.workers),
                    "group_rank": plan.place,
                    "master_addr": master,
                    "master_port": int(port),
                    "prefix": plan.prefix,
                    "restarts": plan.restarts,
                    "resume": plan.resume,
                    "policy": self.config.policy.changed(),
                },
            )

    async def _open_store(self, serial: int) -> None:
        try:
            endpoint = await self._store.open_patiently()
        except StoreError as error:
            self._report(m.StopRequested(cause=str(error), code=ExitCode.USAGE, grace_s=0.0))
            return
        self._report(m.StoreOpened(serial=serial, endpoint=endpoint))

    # --- what happens ------------------------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        return self._plan.epoch if self._plan is not None else 0

    def _tell_progress(self) -> None:
        self._watch.flush()

    def _take_stacks(self, generation: int) -> None:
        self._evidence.take(self._epoch, generation, stacks=True)

    def _flush_if_stuck(self, generation: int) -> None:
        """A planned end was asked for a while ago. Should the ranks not come to it, the keeper has their state."""
        mine = [w for w in self._crew.slots.values() if w.generation == generation and not w.gone.is_set()]
        if any(w.state not in ("finished", "ready") for w in mine):
            self._keeper.flush()

    async def _end_silent(self) -> None:
        """A script without `rt.run` can't be told to leave: a rank whose heartbeats have stopped is killed."""
        while True:
            await asyncio.sleep(_SILENT_LOOK_S)
            for worker, age_s in self._watch.silent():
                if not worker.hung and not self.config.policy.observe:
                    worker.hung = f"no heartbeat for {age_s:.1f} s"
                    self._crew.kill(worker, worker.hung)

    def _reap_adopted(self) -> None:
        self._crew.reap_adopted(frozenset({self._keeper.pid}))

    def _broadcast(self, message: dict[str, Any]) -> None:
        for worker in self._crew.slots.values():
            self._link.send(worker, message)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "agent task failed", "exception": error})
            if not self._stopping:  # half an agent would leave the job waiting
                cause = f"the agent of {self.name} failed: {type(error).__name__}: {error}"
                self._report(m.StopRequested(cause=cause, code=ExitCode.RESTARTS_EXHAUSTED, grace_s=0.0))
