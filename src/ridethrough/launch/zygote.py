"""A process that has imported torch once and forks workers in milliseconds.

Started by the agent as `python -m ridethrough.launch.zygote FD`; FD is one end of a Unix socket pair. It has one
thread, runs no operator of torch and opens no device: only such a process may be forked. Each request carries the
worker's environment, command and output pipes. A worker is forked twice, so that the agent (a subreaper) becomes its
parent and can wait for it. When the agent vanishes, the zygote ends what the job left behind, then itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import random
import shutil
import signal
import socket
import sys
import time
import warnings
from typing import Any, NoReturn

from ridethrough.generation.wire import Decoder, encode
from ridethrough.launch.linux import die_with_parent, kill_tree
from ridethrough.launch.script import run_as_main

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # an optimizer's constructor imports it otherwise: more than a second of CPU
    "torch.utils.data",
    "ridethrough.restart",
    "ridethrough.checkpoint",
)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    agent = int(sys.argv[2])
    job_mark, folder = sys.argv[3], sys.argv[4]
    modules = sys.argv[5:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    try:
        channel.sendall(encode(_prepare(modules)))
        _serve(channel, agent)
    except OSError:  # the agent died meanwhile
        pass
    finally:
        _clean_up(job_mark, folder)


def _prepare(modules: list[str]) -> dict[str, Any]:
    """Imports what workers need; returns what the agent must know to decide whether forking is safe."""
    started = time.monotonic()
    failed = {}
    culprits: list[str] = []
    for name in (*PRELOAD, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        if not culprits and (_num_lasting_threads() > 1 or _devices()):
            culprits.append(name)
    gc.collect()
    gc.freeze()  # what is imported never becomes garbage: collections in the workers take microseconds
    return {
        "ready": True,
        "num_threads": _num_lasting_threads(),
        "devices": _devices(),
        "culprit": "".join(culprits),
        "failed": failed,
        "seconds": time.monotonic() - started,
    }


def _serve(channel: socket.socket, agent: int) -> None:
    decoder = Decoder()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 8)
        if not data:
            return
        requests = decoder.feed(data)
        while not requests:  # the pipes travel with the first bytes of a request
            more = channel.recv(1 << 20)
            if not more:
                return
            requests = decoder.feed(more)
        for request in requests:
            pid = _fork_worker(request, channel, fds, agent)
            for fd in fds:
                os.close(fd)
            fds = []
            channel.sendall(encode({"worker": request["worker"], "pid": pid}))


def _fork_worker(request: dict[str, Any], channel: socket.socket, fds: list[int], agent: int) -> int:
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid != 0:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        channel.close()
        try:
            _become_worker(request, fds, agent)
        finally:
            os._exit(70)
    os.close(write)
    pid = int(os.read(read, 32))
    os.close(read)
    os.waitpid(middle, 0)
    return pid


def _become_worker(request: dict[str, Any], fds: list[int], agent: int) -> NoReturn:
    while os.getppid() != agent:  # the middle process is about to end; its end makes the agent our parent
        if os.getppid() == 1:
            os._exit(70)
        time.sleep(0.0005)
    die_with_parent(agent)
    os.setsid()
    out, err = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.closerange(3, 65536)
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
    stdin = sys.__stdin__
    if stdin is not None:
        sys.stdin = open(0, encoding=stdin.encoding, errors=stdin.errors, closefd=False)  # noqa: SIM115
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        own = getattr(sys, f"__{name}__")
        stream = io.TextIOWrapper(raw, own.encoding, own.errors, line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _reseed()
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # what `-m` put there for the zygote itself
    run_as_main(request["command"])


def _reseed() -> None:
    """Forked workers would all draw the same numbers; a fresh interpreter draws from the system."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _num_lasting_threads() -> int:
    """OpenBLAS starts threads when numpy is imported, ends them before each fork, and starts others when it has work.
    So a fork shows which threads are of that kind; it takes milliseconds and happens only where there are some."""
    if _num_threads() == 1:
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        probe = os.fork()
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    for _ in range(20):
        if _num_threads() == 1:
            break
        time.sleep(0.002)
    return _num_threads()


def _devices() -> list[str]:
    return [name for name in _open_files() if name.startswith("/dev/nvidia")]


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _clean_up(job_mark: str, folder: str) -> None:
    """The agent is gone. Its workers die with it; their own children, and the folder of sockets, are ours to end."""
    kill_tree(-1, job_mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
