"""A node's worker processes: started, watched for their deaths, ended with all that they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import describe
from ridethrough.generation.faults import FaultReport
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.launch import linux
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console
from ridethrough.launch.early import EarlySight
from ridethrough.launch.environment import rank_environment, with_local_rank
from ridethrough.launch.forker import Forker
from ridethrough.launch.logs import WorkerLog
from ridethrough.launch.memory import MemoryGuard, offer_to_killer
from ridethrough.launch.reserve import Reserve
from ridethrough.launch.workers import WorkerProcess, death_report, not_started_report

_GONE_LIMIT_S = 10.0


class Crew:
    """`workers` by id, `slots` by local rank: the newest process of each. `cores`: what each local rank is bound to.

    `report` takes events, `record` ledger events; `before_death` is called before a death is reported, `after_death`
    with a worker whose files are about to be removed. All methods run on the agent's event loop.
    """

    def __init__(
        self,
        config: LaunchConfig,
        node: str,
        *,
        folder: Path,
        logs: Path,
        mark: str,
        env: dict[str, str],
        report: Callable[[m.Event], None],
        record: Callable[..., None],
        spawn_task: Callable[[Coroutine[Any, Any, None]], None],
        before_death: Callable[[], None],
        after_death: Callable[[WorkerProcess], None],
    ) -> None:
        self._config, self._node = config, node
        self._folder, self._logs, self._mark, self._env = folder, logs, mark, env
        self._report, self._record, self._spawn_task = report, record, spawn_task
        self._before_death, self._after_death = before_death, after_death
        self.workers: dict[str, WorkerProcess] = {}
        self.slots: dict[int, WorkerProcess] = {}
        self.cores: list[set[int]] = []
        self._forker = Forker(job_mark=mark, folder=str(folder), preload=config.preload, env=env)
        self._reserve = Reserve(self._forker, config.spares, config.preload, env, self._record)
        self._memory = MemoryGuard(self.workers, self._end_starved)
        self._early = EarlySight(self.workers, self._dying)
        self._console = Console()
        self._stopping = False
        self.failed_late: str | None = None  # a rank that failed behind the training function, when the job was done

    async def open(self) -> None:
        """Returns once workers can be started, in whatever way."""
        if not self._config.no_python:
            self._forker.start()
            if not await self._forker.ready():
                print(f"ridethrough: workers are started anew instead of forked: {self._forker.note}", file=sys.stderr)
            if self._config.spares:
                self._spawn_task(self._reserve.loop())
        self._spawn_task(self._memory.loop())
        self._spawn_task(self._early.loop())

    async def start(self, spawn: m.Spawn) -> None:
        """A process for a slot, once the one before is gone."""
        before = self.slots.get(spawn.local_rank)
        if before is not None and not before.gone.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(before.gone.wait(), _GONE_LIMIT_S)
        page = HeartbeatPage(self._folder / f"heartbeat-{spawn.worker}", create=True)
        log = WorkerLog(self._config, self._logs, spawn.rank, spawn.local_rank, self._console)
        log.begin(spawn.restarts)
        worker = WorkerProcess(spawn.worker, spawn.rank, spawn.local_rank, page, log)
        self.workers[worker.id] = worker
        self.slots[spawn.local_rank] = worker
        env = {**self._env, **rank_environment(self._config, spawn), "RIDETHROUGH_WORKER": worker.id}
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
            self._report(m.WorkerExited(worker=worker.id, report=not_started_report(worker, self._node, error)))
            return
        finally:
            os.close(out)
            os.close(err)
        log.attach(out_read, err_read)
        self._record("worker_spawn", worker=worker.id, pid=worker.pid, rank=worker.rank)
        self._place(worker)
        worker.pidfd = os.pidfd_open(worker.pid)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._on_death, worker)
        if worker.kill_reason or self._stopping:
            self.kill(worker, worker.kill_reason or "the job is over")

    def kill(self, worker: WorkerProcess, why: str) -> None:
        worker.kill_reason = worker.kill_reason or why
        if worker.pid and not worker.gone.is_set():
            self._kill_processes(worker)

    async def end(self, grace_s: float, sig: int, again: asyncio.Event | None) -> None:
        """Ends every worker: `sig` to those that have not been released, `grace_s` seconds or until `again` is set,
        then SIGKILL to whole trees."""
        self._stopping = True
        alive = [w for w in self.workers.values() if not w.gone.is_set()]
        for worker in alive:
            if not worker.released and worker.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, sig)
        if alive:
            waits = [asyncio.ensure_future(w.gone.wait()) for w in alive]
            late = await _all_or_event(waits, again, grace_s)
            for worker in alive:
                if not worker.gone.is_set():
                    self.kill(worker, "the job is over")
            if late:
                await asyncio.wait(waits, timeout=_GONE_LIMIT_S)
        for worker in alive:
            if not worker.gone.is_set():
                print(f"ridethrough: process {worker.pid} (rank {worker.rank}) cannot be killed", file=sys.stderr)

    async def wait(self, limit_s: float, again: asyncio.Event) -> None:
        """Waits until every worker has ended by itself, for `limit_s` at most, or until `again` is set."""
        waits = [asyncio.ensure_future(w.gone.wait()) for w in self.workers.values() if not w.gone.is_set()]
        if waits:
            await _all_or_event(waits, again, limit_s)
            for wait in waits:
                wait.cancel()

    def close(self) -> None:
        """Ends zygote and spares, and every process of the job that is left."""
        self._reserve.stop()
        self._forker.stop()
        linux.kill_tree(-1, self._mark)
        self.reap_adopted(frozenset())
        self._console.tell()

    def reap_adopted(self, helpers: frozenset[int]) -> None:
        """Waits for orphans that became our children; our own workers and helpers are waited for elsewhere."""
        known = {w.pid for w in self.workers.values()} | {self._forker.pid} | self._reserve.pids | helpers
        for entry in linux.children():
            if entry.state == "Z" and entry.pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)

    async def _launch(self, worker: WorkerProcess, env: dict[str, str], out: int, err: int) -> int:
        config = self._config
        command = with_local_rank(config.command, worker.local_rank)
        if not config.no_python:
            try:
                assignment = {"command": command, "env": env, "cwd": config.cwd}
                return await self._reserve.start_worker(assignment, out, err)
            except OSError as error:
                if await self._forker.ready():  # else it was said at the start
                    print(f"ridethrough: rank {worker.rank} is executed, not forked: {error}", file=sys.stderr)
        argv = command if config.no_python else [sys.executable, "-u", *command]
        return self._forker.execute(argv, env, config.cwd, out, err)

    def _place(self, worker: WorkerProcess) -> None:
        """What the agent sets for a new process from outside, and its children inherit."""
        offer_to_killer(worker.pid)
        if worker.local_rank < len(self.cores):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(worker.pid, self.cores[worker.local_rank])

    def _on_death(self, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        self._spawn_task(self._bury(worker, status))

    async def _bury(self, worker: WorkerProcess, status: int) -> None:
        """Reads the process's last words, tells the machine, and ends what it left behind."""
        code = os.waitstatus_to_exitcode(status)
        if code > 0 and worker.early is None:
            worker.log.catch_up()  # the exception's text is in the pipe
        report = worker.early or self._death(worker, status)
        self._record(
            "worker_exit",
            worker=worker.id,
            pid=worker.pid,
            rank=worker.rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
        self._before_death()
        if worker.released and code != 0 and not self._stopping and self.failed_late is None:
            how = describe(128 - code) if code < 0 else f"exit code {code}"
            self.failed_late = f"rank {worker.rank} failed after the training function: {how}"
        if not (worker.released and code == 0):
            self._report(m.WorkerExited(worker=worker.id, report=report))
        self._kill_processes(worker)  # looks at every process of the machine: the others do not wait for that
        await worker.log.drain(2.0)
        self._after_death(worker)
        self._forget(worker)
        worker.gone.set()

    def _dying(self, worker: WorkerProcess, status: int) -> None:
        """The others leave now; the process is buried when the kernel has taken its memory back."""
        worker.log.catch_up()
        worker.early = self._death(worker, status)
        if worker.early is not None and not worker.early.killed_by_us and not worker.released:
            self._report(m.WorkerFaulted(report=worker.early))

    def _death(self, worker: WorkerProcess, status: int) -> FaultReport | None:
        by_kernel = os.WTERMSIG(status) == signal.SIGKILL and not worker.kill_reason and self._memory.struck()
        return death_report(worker, status, oom=by_kernel, node=self._node)

    def _end_starved(self, worker: WorkerProcess, why: str) -> None:
        worker.starved = worker.starved or why
        self.kill(worker, why)

    def _kill_processes(self, worker: WorkerProcess) -> None:
        linux.kill_tree(worker.pid, self._mark, f"RIDETHROUGH_WORKER={worker.id}")

    def _forget(self, worker: WorkerProcess) -> None:
        if worker.writer is not None:
            worker.writer.close()
            worker.writer = None
        self.workers.pop(worker.id, None)
        worker.close()


async def _all_or_event(waits: Sequence[asyncio.Task[bool]], event: asyncio.Event | None, limit_s: float) -> bool:
    """Waits for all, or for the event, or for so long; True if some are late."""
    everybody = asyncio.ensure_future(asyncio.wait(waits))
    hurry = asyncio.ensure_future((event or asyncio.Event()).wait())
    await asyncio.wait([everybody, hurry], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    late = not everybody.done()
    everybody.cancel()
    hurry.cancel()
    return late
