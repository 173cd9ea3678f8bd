"""How the workload's training function is entered and left under each mechanism. Needs what that mechanism needs.

Each entry is what the mechanism's own documentation tells a user to write around a training function; nothing in it
measures. Settings of the peers are their defaults but for polling intervals, which are at their fastest.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

Job = Any
"""`workload.Job`; this file is imported by the script of that name."""


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def _plain(job: Job, beat: Callable[[], None] = lambda: None) -> None:
    """A script that joins the group of its environment and trains: torchrun, a job started anew, a pod."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_seconds(job.settings.timeout_s))
    with _noting(job):
        job.train(job.build, beat=beat)
    dist.destroy_process_group()


@contextlib.contextmanager
def _noting(job: Job) -> Iterator[None]:
    """Notes that the training function was left by an error."""
    try:
        yield
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}"[:200]
        job.log.emit("leave", cause=cause, waiting_ns=job.log.waiting_ns)
        raise


def _ft_launcher(job: Job) -> None:
    client = import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()
    _plain(job, beat=client.send_heartbeat)
    client.shutdown_workload_monitoring()


def _ridethrough(job: Job) -> None:
    import ridethrough as rt

    settings = job.settings

    def train(run: Any) -> None:
        job.log.rank = run.rank
        found: list[Any] = []

        def load(model: Any, optimizer: Any) -> int:
            state = rt.State(model=model, optimizer=optimizer)
            found.append(rt.Checkpointer(settings.out / "checkpoint", state, every=settings.save_every).load())
            return int(found[0].step)

        def steps(start: int) -> Iterator[int]:
            return run.steps(found[0] if found else start, settings.steps)  # type: ignore[no-any-return]

        with _noting(job):
            own = {"steps": steps, "load": load} if settings.own_checkpoint else {}
            job.train(job.build, **own)

    rt.run(train, timeout_s=settings.timeout_s)


# --- NVRx in process -------------------------------------------------------------------------------------------------


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:
            continue
    return found


def _shut(fds: set[int], store_ports: set[int]) -> None:
    """Shuts the group's connections down, as an abort of NCCL would; never listeners or the store's."""
    for fd in fds & _sockets():
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if not {sock.getpeername()[1], sock.getsockname()[1]} & store_ports:
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _nvrx_in_process(job: Job, mended: bool = False) -> None:
    import torch.distributed as dist

    inprocess: Any = import_module("nvidia_resiliency_ext.inprocess")
    settings = job.settings
    port, world = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    group_fds: set[int] = set()

    class Shut(inprocess.abort.Abort):  # type: ignore[misc]
        """Stock NVRx relies on an abort that gloo does not have: its peers wait for the group's timeout."""

        def __call__(self, state: Any) -> Any:
            _shut(group_fds, {port + i for i in range(3)})
            return state

    def train(store: Any, model: Any, optimizer: Any, call_wrapper: Any = None) -> None:
        job.log.rank = int(os.environ["RANK"])
        before = _sockets()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call_wrapper.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=_seconds(settings.timeout_s),
        )
        dist.barrier()
        group_fds.clear()
        group_fds.update(_sockets() - before)
        with _noting(job):
            job.train(lambda: (model, optimizer), beat=call_wrapper.ping)
        dist.destroy_process_group()

    train.__annotations__ = {"call_wrapper": inprocess.CallWrapper}  # the wrapper fills it by type, not by text
    model, optimizer = job.build()  # outside of the wrapped function, as in NVRx's own example
    os.environ.pop("LOCAL_RANK", None)  # with it newer versions add GPU checks that fail where there is no NVML
    store = dist.TCPStore("127.0.0.1", port + 2, world, os.environ["RANK"] == "0", multi_tenant=True)
    stock = inprocess.abort.AbortTorchDistributed()
    second = _seconds(1)
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        abort=inprocess.Compose(stock, Shut()) if mended else stock,
        **{f"{name}_interval": second for name in ("monitor_thread", "monitor_process", "heartbeat")},
        progress_watchdog_interval=second,
        soft_timeout=_seconds(60),
        hard_timeout=_seconds(90),
        barrier_timeout=_seconds(120),
        completion_timeout=_seconds(120),
        heartbeat_timeout=_seconds(30),
        last_call_wait=second,
        termination_grace_time=_seconds(5),
        monitor_process_logfile=str(settings.out / "monitor_{rank}.log"),
    )
    wrapper(train)(store, model, optimizer)


# --- torchft ---------------------------------------------------------------------------------------------------------


def _torchft(job: Job) -> None:
    """Replicas of one rank; a failed step is dropped by the survivors, who go on without the dead one."""
    import torch.distributed as dist

    torchft: Any = import_module("torchft")
    settings, log = job.settings, job.log
    model, optimizer = job.build()
    limit = _seconds(settings.timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"r{log.rank}_",
        timeout=limit,
        quorum_timeout=_seconds(60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    stepper = torchft.Optimizer(manager, optimizer)
    log.emit("enter")
    begun_ns, loss = time.monotonic_ns(), float("nan")
    log.emit("loop", step=0)
    while manager.current_step() < settings.steps:
        step = manager.current_step() + 1
        loss = job.train_step(wrapped, stepper, step)
        now = time.monotonic_ns()
        taken = manager.current_step()
        if taken >= step:
            members = manager.num_participants()
            log.emit("step", step=taken, t0_ns=begun_ns, t1_ns=now, parts=[], loss=loss, participants=members)
        else:
            log.emit("leave", cause="the step was dropped")
        begun_ns = now
    log.emit("finish", step=settings.steps)
    digest = sys.modules["__main__"].digest
    log.emit("final", final_hash=digest(model, optimizer), final_loss=loss)
    manager.shutdown(wait=False)
    os._exit(0)


ENTRIES: dict[str, Callable[[Job], None]] = {
    "ridethrough": _ridethrough,
    "ridethrough-process": _ridethrough,
    "ridethrough-node": _ridethrough,
    "torchrun": _plain,
    "restart-job": _plain,
    "kubernetes-pods": _plain,
    "nvrx-launcher": _ft_launcher,
    "nvrx-inprocess": _nvrx_in_process,
    "nvrx-inprocess-mended": lambda job: _nvrx_in_process(job, mended=True),
    "torchft": _torchft,
}
