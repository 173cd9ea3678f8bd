"""The node agent: owns the node's worker processes and carries out what the generation machine decides.

One asyncio loop in the agent's main thread. Workers speak to it over a Unix socket; it watches their heartbeat pages,
waits for their deaths and reports everything as events through `report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.membership import WorkerState
from ridethrough.generation.plan import Plan
from ridethrough.generation.socket_folder import socket_folder, temporary_roots
from ridethrough.generation.wire import Decoder, WireError, encode
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.launch import linux
from ridethrough.launch.compaction import keep_compact
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.early import EarlySight
from ridethrough.launch.environment import rank_environment, with_local_rank, worker_environment
from ridethrough.launch.evidence import Evidence
from ridethrough.launch.forker import Forker
from ridethrough.launch.keeper import KeeperProcess
from ridethrough.launch.logs import WorkerLog
from ridethrough.launch.memory import MemoryGuard, offer_to_killer
from ridethrough.launch.numa import cores_of_ranks
from ridethrough.launch.store import StoreError, StoreHost
from ridethrough.launch.watch import Watch
from ridethrough.launch.workers import WorkerProcess, death_report
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

_GONE_LIMIT_S = 10.0
_SILENT_LOOK_S = 0.5
_STATE_AFTER: dict[str, WorkerState] = {"ready": "ready", "entered": "inside", "finished": "finished"}


class NodeAgent:
    """`report(event)` takes what happens to the machine; `perform(action)` does what the machine says.

    `start` begins the node's helpers, `stop` ends every process and removes every file that this agent made. All
    methods run in the main thread.
    """

    def __init__(
        self, config: LaunchConfig, run: RunDir, recorder: Recorder, report: Callable[[m.Event], None], address: str
    ) -> None:
        self.name = socket.gethostname()
        self.node = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self.config = config
        self.run = run
        self._recorder = recorder
        self._report = report
        sweep_folders()
        self._folder = socket_folder(f"ridethrough-{os.getpid()}-")
        self._job = uuid.uuid4().hex
        self._mark = f"RIDETHROUGH_JOB={self._job}"
        self._workers: dict[str, WorkerProcess] = {}
        self._slots: dict[int, WorkerProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = StoreHost(address, config.master_port)
        base_env = worker_environment(config, run, self._folder, self._job, address)
        self._forker = Forker(job_mark=self._mark, folder=str(self._folder), preload=config.preload, env=base_env)
        several = config.max_nodes > 1 and bool(config.token)
        self._keeper = KeeperProcess(
            self._folder / "keeper.sock",
            run,
            address=address if several else "",
            token=config.token,
            replicas=config.replicas,
            rate=config.replica_rate,
        )
        self._base_env = base_env
        self._evidence = Evidence(run.incidents_dir, self.name, self._workers)
        self._watch = Watch(config.policy, self.node, self._workers, report, recorder.emit, self._take_stacks)
        self._memory = MemoryGuard(self._workers, self._end_starved)
        self._early = EarlySight(self._workers, self._dying)
        self._cores: list[set[int]] = []
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._started = False
        self._plan: Plan | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts zygote, keeper, link and watch; returns once workers can be started."""
        linux.become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_adopted)
        path = self._folder / "agent.sock"
        self._server = await asyncio.start_unix_server(self._serve_worker, path)
        os.chmod(path, 0o600)
        if not self.config.no_python:
            self._forker.start()
        self._keeper.start()
        await asyncio.to_thread(__import__, "torch.distributed")
        if not self.config.no_python and not await self._forker.ready():
            print(f"ridethrough: workers are started anew instead of forked: {self._forker.note}", file=sys.stderr)
        if self.config.numa_binding:
            self._cores = await cores_of_ranks(self.config.numa_binding, self.config.num_workers)
        for loop in (self._watch.loop(), self._memory.loop(), self._early.loop()):
            self._spawn_task(loop)
        self._spawn_task(keep_compact(self.run))
        self._spawn_task(self._end_silent())
        self._started = True
        self.join()

    def join(self) -> None:
        """Tells the machine that this node is there; to a coordinator that has just been started again, what it is."""
        if not self._started:
            return
        if self._plan is None:
            size, place = self.config.num_workers, self.config.place
            self._report(m.NodeJoined(node=self.node, name=self.name, num_workers=size, place=place))
            return
        workers = tuple(
            m.WorkerSnapshot(worker=w.id, local_rank=w.local_rank, state=w.state, attached=w.writer is not None)
            for w in self._slots.values()
            if not w.gone.is_set()
        )
        self._report(m.NodeRejoined(node=self.node, name=self.name, plan=self._plan, workers=workers))

    def abandon_workers(self, why: str) -> None:
        """Ends every worker; the keeper with its snapshots stays."""
        for worker in list(self._workers.values()):
            self._kill(worker, why)

    async def stop(self, grace_s: float, *, sig: int = signal.SIGTERM, again: asyncio.Event | None = None) -> None:
        """Ends what still runs: `sig`, `grace_s` seconds or until `again` is set, then SIGKILL to whole trees. Leaves
        nothing behind."""
        self._stopping = True
        alive = [w for w in self._workers.values() if not w.gone.is_set()]
        for worker in alive:
            if not worker.released:
                self._signal(worker, sig)
        if alive:
            waits = [asyncio.ensure_future(w.gone.wait()) for w in alive]
            late = await _all_or_event(waits, again, grace_s)
            for worker in alive:
                if not worker.gone.is_set():
                    self._kill(worker, "the job is over")
            if late:
                await asyncio.wait(waits, timeout=_GONE_LIMIT_S)
        for worker in alive:
            if not worker.gone.is_set():
                print(f"ridethrough: process {worker.pid} (rank {worker.rank}) cannot be killed", file=sys.stderr)
        for task in list(self._tasks):
            task.cancel()
        self._recorder.emit(
            "intervals", longest_s=self._watch.intervals(), deadline_s=self._watch.judge.step_deadline_s()
        )
        if self._server is not None:
            self._server.close()
        await self._keeper.stop(again)
        self._forker.stop()
        linux.kill_tree(-1, self._mark)
        self._reap_adopted()
        self._store.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what the machine says -------------------------------------------------------------------------------------

    def perform(self, action: m.Action) -> None:
        """Carries out one action for this node; never blocks. What takes time reports its end as an event."""
        if isinstance(action, m.Spawn):
            self._spawn_task(self._start_worker(action))
        elif isinstance(action, m.OpenStore):
            self._spawn_task(self._open_store(action.serial))
        elif isinstance(action, m.Enter):
            self._enter(action)
        elif isinstance(action, m.Leave):
            self._watch.generation_ends()
            self._take_evidence(action.generation)
            self._broadcast({"t": "leave", "generation": action.generation, "why": action.why})
        elif isinstance(action, m.Kill):
            worker = self._workers.get(action.worker)
            if worker is not None:
                self._kill(worker, action.why)
        elif isinstance(action, m.AskStep):
            self._broadcast({"t": "ask_step", "generation": action.generation, "cause": action.cause})
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.policy.stop_grace_s / 3, self._flush_if_stuck, action.generation)
        elif isinstance(action, m.StopAt):
            self._broadcast({"t": "stop_at", "generation": action.generation, "step": action.step})
        elif isinstance(action, m.Inspect):
            situations = self._watch.situations()
            self._report(m.Inspected(node=self.node, generation=action.generation, situations=situations))

    def _take_stacks(self, generation: int) -> None:
        self._evidence.take(self._plan.epoch if self._plan is not None else 0, generation, stacks=True)

    def _flush_if_stuck(self, generation: int) -> None:
        """A planned end was asked for a while ago. Should the ranks not come to it, the keeper has their state."""
        mine = [w for w in self._slots.values() if w.generation == generation and not w.gone.is_set()]
        if any(w.state not in ("finished", "ready") for w in mine):
            self._keeper.flush()

    def _take_evidence(self, generation: int) -> None:
        self._evidence.take(self._plan.epoch if self._plan is not None else 0, generation)

    def release(self, code: int) -> None:
        """The job is over: workers that wait in `rt.run` go on behind it."""
        for worker in self._slots.values():
            worker.released = worker.writer is not None
        self._broadcast({"t": "done", "code": code})

    async def wait_workers(self, limit_s: float, again: asyncio.Event) -> None:
        """Waits until every released worker has ended by itself, for `limit_s` at most, or until `again` is set."""
        waits = [asyncio.ensure_future(w.gone.wait()) for w in self._workers.values() if not w.gone.is_set()]
        if waits:
            await _all_or_event(waits, again, limit_s)
            for wait in waits:
                wait.cancel()

    # --- workers -----------------------------------------------------------------------------------------------------

    async def _start_worker(self, spawn: m.Spawn) -> None:
        before = self._slots.get(spawn.local_rank)
        if before is not None and not before.gone.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(before.gone.wait(), _GONE_LIMIT_S)
        page = HeartbeatPage(self._folder / f"heartbeat-{spawn.worker}", create=True)
        log = WorkerLog(self.config, self.config.log_dir or self.run.logs_dir, spawn.rank, spawn.local_rank)
        log.begin(spawn.restarts)
        worker = WorkerProcess(spawn.worker, spawn.rank, spawn.local_rank, page, log)
        self._workers[worker.id] = worker
        self._slots[spawn.local_rank] = worker
        env = {**self._base_env, **rank_environment(self.config, spawn), "RIDETHROUGH_WORKER": worker.id}
        env["RIDETHROUGH_HEARTBEAT"] = str(page.path)
        if log.path is not None:
            env["TORCHELASTIC_ERROR_FILE"] = str(log.path.with_suffix(".error.json"))
        out_read, out = os.pipe()
        err_read, err = os.pipe()
        try:
            worker.pid = await self._launch(worker, env, out, err)
        except OSError as error:
            print(f"ridethrough: rank {spawn.rank} cannot be started: {error}", file=sys.stderr)
            os.close(out_read)
            os.close(err_read)
            worker.gone.set()
            self._forget(worker)
            self._report(m.WorkerExited(worker=worker.id, report=_not_started(worker, self.node, error)))
            return
        finally:
            os.close(out)
            os.close(err)
        log.attach(out_read, err_read)
        self._recorder.emit("worker_spawn", worker=worker.id, pid=worker.pid, node=self.node, rank=worker.rank)
        self._place(worker)
        worker.pidfd = os.pidfd_open(worker.pid)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._on_death, worker)
        if worker.kill_reason or self._stopping:
            self._kill(worker, worker.kill_reason or "the job is over")

    def _place(self, worker: WorkerProcess) -> None:
        """What the agent sets for a new process from outside, and its children inherit."""
        offer_to_killer(worker.pid)
        if worker.local_rank < len(self._cores):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(worker.pid, self._cores[worker.local_rank])

    async def _launch(self, worker: WorkerProcess, env: dict[str, str], out: int, err: int) -> int:
        config = self.config
        command = with_local_rank(config.command, worker.local_rank)
        if not config.no_python and await self._forker.ready():
            try:
                return await self._forker.fork(worker.id, command, env, config.cwd, out, err)
            except (OSError, asyncio.TimeoutError) as error:
                print(f"ridethrough: {error}; starting another zygote", file=sys.stderr)
                self._forker.start()
        argv = command if config.no_python else [sys.executable, "-u", *command]
        return self._forker.execute(argv, env, config.cwd, out, err)

    def _on_death(self, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        self._spawn_task(self._bury(worker, status))

    async def _bury(self, worker: WorkerProcess, status: int) -> None:
        """Ends what the process left behind, reads its last words, and tells the machine."""
        linux.kill_tree(worker.pid, f"RIDETHROUGH_WORKER={worker.id}")
        self._reap_adopted()
        code = os.waitstatus_to_exitcode(status)
        if code > 0:
            await worker.log.drain(1.0)  # the exception's text is in the pipe
        report = worker.early or self._death(worker, status)
        self._recorder.emit(
            "worker_exit",
            worker=worker.id,
            pid=worker.pid,
            node=self.node,
            rank=worker.rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
        self._watch.flush()
        if not (worker.released and code == 0):
            self._report(m.WorkerExited(worker=worker.id, report=report))
        await worker.log.drain(2.0)
        self._evidence.keep_now(worker, self._plan.epoch if self._plan is not None else 0)
        self._forget(worker)
        worker.gone.set()

    def _dying(self, worker: WorkerProcess, status: int) -> None:
        """The others leave now; the process is buried when the kernel has taken its memory back."""
        worker.early = self._death(worker, status)
        if worker.early is not None and not worker.early.killed_by_us and not worker.released:
            self._report(m.WorkerFaulted(report=worker.early))

    def _death(self, worker: WorkerProcess, status: int) -> FaultReport | None:
        by_kernel = os.WTERMSIG(status) == signal.SIGKILL and not worker.kill_reason and self._memory.struck()
        return death_report(worker, status, oom=by_kernel, node=self.node)

    def _end_starved(self, worker: WorkerProcess, why: str) -> None:
        worker.starved = worker.starved or why
        self._kill(worker, why)

    def _forget(self, worker: WorkerProcess) -> None:
        if worker.writer is not None:
            worker.writer.close()
            worker.writer = None
        self._workers.pop(worker.id, None)
        worker.close()

    def _kill(self, worker: WorkerProcess, why: str) -> None:
        worker.kill_reason = worker.kill_reason or why
        if worker.pid and not worker.gone.is_set():
            linux.kill_tree(worker.pid, f"RIDETHROUGH_WORKER={worker.id}")

    async def _end_silent(self) -> None:
        """A script without `rt.run` can't be told to leave: a rank whose heartbeats have stopped is killed."""
        while True:
            await asyncio.sleep(_SILENT_LOOK_S)
            for worker, age_s in self._watch.silent():
                if not worker.hung and not self.config.policy.observe:
                    worker.hung = f"no heartbeat for {age_s:.1f} s"
                    self._kill(worker, worker.hung)

    def _signal(self, worker: WorkerProcess, sig: int) -> None:
        if worker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, sig)

    def _reap_adopted(self) -> None:
        """Waits for orphans that became our children; our own workers and helpers are waited for elsewhere."""
        known = {w.pid for w in self._workers.values()} | {self._forker.pid, self._keeper.pid}
        for entry in linux.children():
            if entry.state == "Z" and entry.pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)

    def _enter(self, action: m.Enter) -> None:
        plan = action.plan
        mine = plan.for_node(self.node)
        if mine is None:
            return
        self._plan = plan
        master, _, port = plan.store.rpartition(":")
        self._watch.generation_begins(plan.generation, plan.world_size)
        for local_rank, name in enumerate(mine.workers):
            worker = self._workers.get(name)
            if worker is None:
                continue
            worker.rank, worker.generation, worker.state = mine.first_rank + local_rank, plan.generation, "entering"
            worker.log.switch(plan.generation, worker.rank)
            self._send(
                worker,
                {
                    "t": "plan",
                    "epoch": plan.epoch,
                    "generation": plan.generation,
                    "rank": worker.rank,
                    "local_rank": 0 if self.config.virtual_local_rank else local_rank,
                    "world_size": plan.world_size,
                    "local_world_size": len(mine.workers),
                    "group_rank": plan.group_rank(self.node),
                    "master_addr": master,
                    "master_port": int(port),
                    "prefix": plan.prefix,
                    "restarts": plan.restarts,
                    "resume": plan.resume,
                },
            )

    async def _open_store(self, serial: int) -> None:
        try:
            endpoint = await self._store.open_patiently()
        except StoreError as error:
            self._report(m.StopRequested(cause=str(error), code=2, grace_s=0.0))
            return
        self._report(m.StoreOpened(serial=serial, endpoint=endpoint))

    # --- the link to the workers -------------------------------------------------------------------------------------

    async def _serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's connection: only processes of our own user are heard."""
        sock: socket.socket = writer.get_extra_info("socket")
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        decoder = Decoder()
        worker: WorkerProcess | None = None
        try:
            while uid == os.getuid() and (data := await reader.read(1 << 16)):
                for message in decoder.feed(data):
                    if message.get("t") == "hello":
                        worker = self._hello(message, writer)
                        if worker is None:
                            return
                    elif worker is not None:
                        self._from_worker(worker, message)
        except (ConnectionError, WireError, KeyError, ValueError) as error:
            print(f"ridethrough: a worker's connection broke: {error}", file=sys.stderr)
        finally:
            if worker is not None and worker.writer is writer:
                worker.writer = None
            writer.close()

    def _hello(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> WorkerProcess | None:
        worker = self._workers.get(message["worker"])
        if message.get("protocol") != m.PROTOCOL:
            why = f"the worker speaks protocol {message.get('protocol')}, its agent {m.PROTOCOL}: install one version"
            writer.write(encode({"t": "refused", "why": why}))
            return None
        if worker is not None:
            worker.writer = writer
        return worker

    def _from_worker(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        self._watch.flush()
        kind = message["t"]
        worker.state = _STATE_AFTER.get(kind, worker.state)
        if kind == "ready":
            self._watch.left(worker.rank, message.get("left_by", ""))
            self._report(
                m.WorkerReady(worker=worker.id, left=message["generation"], inventory=message.get("inventory", {}))
            )
        elif kind == "entered":
            self._report(m.WorkerEntered(worker=worker.id, generation=message["generation"]))
        elif kind == "replace":
            self._kill(worker, message["why"])
        elif kind == "fault":
            fields = {**message["report"], "worker": worker.id, "node": self.node, "pid": worker.pid}
            report = FaultReport.model_validate({**fields, "declared_ns": time.monotonic_ns()})
            self._report(m.WorkerFaulted(report=report))
        elif kind == "finished":
            self._report(
                m.WorkerFinished(
                    worker=worker.id,
                    generation=message["generation"],
                    step=message.get("step", 0),
                    stopped=message.get("stopped", False),
                )
            )
        elif kind == "step_at":
            self._report(m.StepAt(worker=worker.id, generation=message["generation"], step=message["step"]))

    def _broadcast(self, message: dict[str, Any]) -> None:
        for worker in self._slots.values():
            self._send(worker, message)

    def _send(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if worker.writer is not None:
            worker.writer.write(encode(message))

    def _spawn_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "agent task failed", "exception": error})


def sweep_folders() -> None:
    """Removes what an agent left that was killed before its zygote could clean up behind it."""
    for folder in [folder for root in temporary_roots() for folder in root.glob("ridethrough-*-*")]:
        pid = folder.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):  # another launcher sweeps too
            if pid.isdigit() and linux.is_gone(int(pid)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


async def _all_or_event(waits: Sequence[asyncio.Task[bool]], event: asyncio.Event | None, limit_s: float) -> bool:
    """Waits for all, or for the event, or for so long; True if some are late."""
    everybody = asyncio.ensure_future(asyncio.wait(waits))
    hurry = asyncio.ensure_future((event or asyncio.Event()).wait())
    await asyncio.wait([everybody, hurry], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    late = not everybody.done()
    everybody.cancel()
    hurry.cancel()
    return late


def _not_started(worker: WorkerProcess, node: str, error: OSError) -> FaultReport:
    name = errno.errorcode.get(error.errno or 0, "error")
    return FaultReport(
        generation=worker.generation,
        worker=worker.id,
        rank=worker.rank,
        node=node,
        fault_class="exit",
        detected_by="waitpid",
        phase="launch",
        cause=f"the process could not be started: {error} ({name})",
        declared_ns=time.monotonic_ns(),
    )
