"""`python -m ridethrough.launch.sidecar`: the agent beside ranks that somebody else started (torchrun, srun, mpirun,
a plain python).

Its standard input is its configuration as JSON. To the generation machine each rank is a node with one slot that
nobody can fill again: a rank that is gone shrinks the world, if `min_world_size` allows, or ends the job. Node 0's
sidecar hosts the coordinator; the others connect to it, once per rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation import peer
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.handshake import read_token
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.policy import Policy
from ridethrough.generation.wire import Decoder, WireError, encode
from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.epoch import claim_epoch
from ridethrough.launch.evidence import Evidence
from ridethrough.launch.last_words import last_words, write_result
from ridethrough.launch.logs import WorkerLog
from ridethrough.launch.server import CoordinatorServer
from ridethrough.launch.store import StoreHost
from ridethrough.launch.uplink import Uplink
from ridethrough.launch.watch import Watch
from ridethrough.launch.workers import WorkerProcess
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir, create_run

_GATHER_LIMIT_S = 600.0
_GOODBYE_LIMIT_S = 20.0


@dataclass
class Member:
    """One rank of this node. `worker_id` is the name that the machine gave it, empty before."""

    node: str
    local_rank: int
    process: WorkerProcess
    worker_id: str = ""
    ready: m.WorkerReady | None = None
    uplink: Uplink | None = None
    gone: bool = False
    events: list[m.Event] = field(default_factory=list)


class Sidecar:
    """One node's. One event loop, one thread; ends when its ranks have."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._folder = Path(config["folder"])
        self._policy = Policy(**config["policy"])
        self._run = _run_folder(config, self._folder)
        self._recorder = Recorder(self._run.path, "agent")
        self._members: dict[int, Member] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._store: StoreHost | None = None
        self._coordinator: Coordinator | None = None
        self._server: CoordinatorServer | None = None
        self._evidence = Evidence(self._run.incidents_dir, socket.gethostname(), self._processes)
        self._watch: Watch | None = None
        self._done: asyncio.Future[m.JobDone] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []
        self._epoch = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal, sig)
        if self._config["node_rank"] == 0:
            await self._host()
        path = self._folder / "agent.sock"
        server = await asyncio.start_unix_server(self._serve, path)
        os.chmod(path, 0o600)
        begun = time.monotonic()
        while not self._done.done():
            self._left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), 0.2)
            everybody_left = bool(self._members) and all(member.gone for member in self._members.values())
            if everybody_left and (self._coordinator is None or self._config["num_nodes"] == 1):
                self._end(m.JobDone(code=ExitCode.RESTARTS_EXHAUSTED, reason="all ranks of this node are gone"))
            if not self._members and time.monotonic() - begun > _GATHER_LIMIT_S:
                self._end(m.JobDone(code=ExitCode.RESTARTS_EXHAUSTED, reason="no rank came"))
        done = self._done.result()
        for member in self._members.values():
            self._tell(member, {"t": "done", "code": done.code})
        if self._server is not None:
            await self._server.stop(done, _GOODBYE_LIMIT_S)
        while not all(member.gone for member in self._members.values()):  # a rank without its agent would end itself
            self._left.clear()
            await self._left.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        if self._watch is not None:
            deadline_s = self._watch.judge.step_deadline_s()
            self._recorder.emit("intervals", longest_s=self._watch.intervals(), deadline_s=deadline_s)
        self._recorder.emit("job_end", code=done.code, reason=done.reason)
        if self._coordinator is not None:
            write_result(self._run, done)
            last_words(self._coordinator.last_incident, done)
        return done.code

    async def _host(self) -> None:
        config = self._config
        machine = GenerationMachine(
            num_workers=1,
            min_nodes=config["min_world_size"],
            max_nodes=config["world_size"],
            policy=self._policy,
            epoch=claim_epoch(self._run.path),
        )
        coordinator = self._coordinator = Coordinator(machine, self._recorder, self._run.path)
        coordinator.deliver = self._deliver
        coordinator.done.add_done_callback(lambda done: self._end(done.result()))
        if config["num_nodes"] > 1:
            told = {"epoch": machine.epoch, "run_id": self._run.run_id, "num_workers": 1}
            self._server = CoordinatorServer(coordinator, _token(config), told, self._policy.lease_s)
            await self._server.start("", config["port"])
        slots = config["world_size"]
        about = {"nodes": config["num_nodes"], "run_id": self._run.run_id, "policy": self._policy.changed()}
        self._recorder.emit("job_start", slots=slots, **about)
        self._tasks.append(asyncio.ensure_future(coordinator.tick()))

    def _end(self, done: m.JobDone) -> None:
        if not self._done.done():
            self._done.set_result(done)

    def _on_signal(self, sig: signal.Signals) -> None:
        stop = m.StopRequested(cause=sig.name, code=128 + sig, grace_s=self._policy.stop_grace_s)
        self._post(next(iter(self._members.values()), None), stop)

    # --- to and from the machine -------------------------------------------------------------------------------------

    def _post(self, member: Member | None, event: m.Event) -> None:
        if self._coordinator is not None:
            self._coordinator.post(event)
        elif member is not None and member.uplink is not None:
            member.uplink.send(event)

    def _deliver(self, node: str, action: m.Action) -> None:
        member = self._by_node(node)
        if member is not None:
            self._act(member, action)
        elif self._server is not None:
            self._server.deliver(node, action)

    def _by_node(self, node: str) -> Member | None:
        return next((member for member in self._members.values() if member.node == node), None)

    def _act(self, member: Member, action: m.Action) -> None:
        if isinstance(action, m.JobDone):
            self._end(action)
        elif isinstance(action, m.Spawn):
            member.worker_id = action.worker
            if member.ready is not None:
                self._post(member, member.ready.model_copy(update={"worker": action.worker}))
        elif isinstance(action, m.OpenStore):
            self._tasks.append(asyncio.ensure_future(self._open_store(member, action)))
        elif isinstance(action, m.Enter):
            self._enter(member, action)
        elif isinstance(action, m.Leave):
            if self._watch is not None:
                self._watch.generation_ends()
            self._evidence.take(self._epoch, action.generation)
            self._tell(member, {"t": "leave", "generation": action.generation, "why": action.why})
        elif isinstance(action, m.Kill):
            print(f"ridethrough: rank {member.process.rank} is killed: {action.why}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGKILL)
        elif isinstance(action, m.AskStep):
            self._tell(member, {"t": "ask_step", "generation": action.generation, "cause": action.cause})
        elif isinstance(action, m.StopAt):
            self._tell(member, {"t": "stop_at", "generation": action.generation, "step": action.step})
        elif isinstance(action, m.Inspect) and self._watch is not None:
            situations = self._watch.situations()
            self._post(member, m.Inspected(node=member.node, generation=action.generation, situations=situations))

    async def _open_store(self, member: Member, action: m.OpenStore) -> None:
        if self._config["world_size"] == 1:
            endpoint = "127.0.0.1:0"  # one rank needs no store
        else:
            if self._store is None:
                await asyncio.to_thread(__import__, "torch.distributed")
                address = "127.0.0.1" if self._config["num_nodes"] == 1 else _own_address(self._config["host"])
                self._store = StoreHost(address)
            endpoint = self._store.open()
        self._post(member, m.StoreOpened(serial=action.serial, endpoint=endpoint))

    def _enter(self, member: Member, action: m.Enter) -> None:
        plan = action.plan
        here = [other for other in self._members.values() if not other.gone]
        if self._watch is not None:
            self._watch.generation_begins(plan.generation, plan.world_size)
        self._epoch = plan.epoch
        process = member.process
        process.rank, process.generation, process.state = plan.first_rank, plan.generation, "entering"
        master, _, port = plan.store.rpartition(":")
        self._tell(
            member,
            {
                "t": "plan",
                "epoch": plan.epoch,
                "generation": plan.generation,
                "rank": plan.first_rank,
                "local_rank": member.local_rank,  # the GPU stays, whoever is gone
                "world_size": plan.world_size,
                "local_world_size": len(here),
                "group_rank": self._config["node_rank"],
                "master_addr": master,
                "master_port": int(port),
                "prefix": plan.prefix,
                "restarts": plan.restarts,
                "resume": plan.resume,
                "policy": self._policy.changed(),
            },
        )

    # --- to and from the ranks ---------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        ours, (pid, _) = peer.is_ours(sock), peer.peer_credentials(sock)
        decoder = Decoder()
        member: Member | None = None
        try:
            while ours and (data := await reader.read(1 << 16)):
                for message in decoder.feed(data):
                    if message["t"] == "join":
                        writer.write(encode(self._join(message, pid)))
                    elif message["t"] == "hello":
                        member = next((x for x in self._members.values() if x.process.id == message["worker"]), None)
                        if member is not None:
                            member.process.writer = writer
                            self._gathered()
                    elif member is not None:
                        self._hear(member, message)
        except (ConnectionError, WireError, KeyError, ValueError) as error:
            print(f"ridethrough: a rank's connection broke: {error}", file=sys.stderr)
        finally:
            writer.close()
            if member is not None:
                self._gone(member)

    def _join(self, message: dict[str, Any], pid: int) -> dict[str, Any]:
        if message.get("protocol") != m.PROTOCOL:
            why = f"the rank speaks protocol {message.get('protocol')}, its agent {m.PROTOCOL}: install one version"
            return {"t": "refused", "why": why}
        rank, local_rank = int(message["rank"]), int(message["local_rank"])
        if local_rank in self._members:
            return {"t": "refused", "why": f"local rank {local_rank} has joined already: is the job started twice?"}
        worker = f"side-{rank}"
        page = HeartbeatPage(self._folder / f"heartbeat-{worker}", create=True)
        unread = WorkerLog(LaunchConfig(command=[], echo=False), None, rank, local_rank, Console())
        process = WorkerProcess(worker, rank, local_rank, page, unread, pid=pid)
        process.pidfd = os.pidfd_open(pid)
        self._members[local_rank] = Member(f"{socket.gethostname()}/{local_rank}-{pid}", local_rank, process)
        self._processes[worker] = process
        self._recorder.emit("worker_spawn", worker=worker, pid=pid, node=socket.gethostname(), rank=rank)
        run_dir = str(self._run.path) if self._config["runs"] else ""
        return {"t": "joined", "worker": worker, "heartbeat": str(page.path), "run_dir": run_dir}

    def _gathered(self) -> None:
        """All ranks of this node are here: they join the job, in the order of their ranks."""
        members = [self._members[i] for i in sorted(self._members)]
        whole = len(members) == self._config["local_world_size"] and all(x.process.writer for x in members)
        if not whole or self._watch is not None:
            return
        self._watch = Watch(
            self._policy,
            members[0].node,
            self._processes,
            lambda event: self._post(members[0], event),
            self._recorder.emit,
            lambda generation: self._evidence.take(self._epoch, generation, stacks=True),
        )
        self._tasks.append(asyncio.ensure_future(self._watch.loop()))
        for member in members:
            if self._coordinator is None:
                member.uplink = self._make_uplink(member)
                self._tasks.append(asyncio.ensure_future(member.uplink.run()))
            else:
                self._post(member, m.NodeJoined(node=member.node, name=member.node, num_workers=1))

    def _make_uplink(self, member: Member) -> Uplink:
        def joined() -> None:
            self._post(member, m.NodeJoined(node=member.node, name=member.node, num_workers=1))

        act: Callable[[m.Action], None] = lambda action: self._act(member, action)  # noqa: E731
        return Uplink(
            self._config["host"],
            self._config["port"],
            _token(self._config),
            on_welcome=lambda welcome, address: None,
            hello=lambda: {"node": member.node, "name": member.node, "num_workers": 1},
            on_unknown=joined,
            on_action=act,
        )

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch.flush()
        kind, worker = message["t"], member.worker_id
        if kind == "ready":
            if self._watch is not None:
                self._watch.left(member.process.rank, message.get("left_by", ""))
            member.ready = m.WorkerReady(worker=worker, left=message["generation"])
            if worker:
                self._post(member, member.ready)
        elif kind == "entered":
            self._post(member, m.WorkerEntered(worker=worker, generation=message["generation"]))
        elif kind == "replace":
            print(
                f"ridethrough: rank {member.process.rank} leaves the job: {message['why']}", file=sys.stderr, flush=True
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGKILL)
        elif kind == "fault":
            fields = {**message["report"], "worker": worker, "node": member.node, "pid": member.process.pid}
            report = FaultReport.model_validate({**fields, "declared_ns": time.monotonic_ns()})
            self._post(member, m.WorkerFaulted(report=report))
        elif kind == "finished":
            step, stopped = message.get("step", 0), message.get("stopped", False)
            generation = message["generation"]
            self._post(member, m.WorkerFinished(worker=worker, generation=generation, step=step, stopped=stopped))
        elif kind == "step_at":
            self._post(member, m.StepAt(worker=worker, generation=message["generation"], step=message["step"]))

    def _tell(self, member: Member, message: dict[str, Any]) -> None:
        if member.process.writer is not None:
            member.process.writer.write(encode(message))

    def _gone(self, member: Member) -> None:
        """The rank's process has ended. Before the job has, that is a fault, and its place stays empty."""
        process = member.process
        process.writer = None
        member.gone = True
        self._left.set()
        self._recorder.emit(
            "worker_exit",
            worker=process.id,
            pid=process.pid,
            node=socket.gethostname(),
            rank=process.rank,
            exit_code=None,
            signal=None,
        )
        if self._done.done():
            return
        reading = process.reading()
        report = FaultReport(
            generation=process.generation,
            worker=member.worker_id,
            rank=process.rank,
            node=member.node,
            pid=process.pid,
            fault_class="exit",
            detected_by="waitpid",
            phase=reading.phase,
            step=reading.step or None,
            cause="the process is gone; only ridethrough run replaces processes",
            declared_ns=time.monotonic_ns(),
            fault_ns=max(reading.step_ns, reading.phase_ns) or None,
        )
        self._post(member, m.WorkerFaulted(report=report))
        self._post(member, m.NodeLeft(node=member.node))


def _run_folder(config: dict[str, Any], folder: Path) -> RunDir:
    """Kept where the user said so, else private and gone with the job."""
    root = Path(config["runs"]) if config["runs"] and config["node_rank"] == 0 else folder / "runs"
    settings = {"world_size": config["world_size"], "started_by": "rt.run"}
    return create_run(root, run_id=None, config=settings, command=config["command"], schedule_hash=None)


def _token(config: dict[str, Any]) -> str:
    return read_token(Path(config["token_file"]) if config["token_file"] else None)


def _own_address(host: str) -> str:
    """The address by which this host reaches node 0's, and others reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])


async def _main(config: dict[str, Any]) -> int:
    return await Sidecar(config).run()


def main() -> None:
    config = json.loads(sys.stdin.read())
    try:
        sys.exit(asyncio.run(_main(config)))
    finally:
        shutil.rmtree(config["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()
