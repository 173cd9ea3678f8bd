"""A process that has imported torch once and forks workers in milliseconds.

Started by the agent as `python -m ridethrough.launch.zygote FD`; FD is one end of a Unix socket pair. It has one
thread, runs no operator of torch and opens no device: only such a process may be forked. Each request carries the
socket at which a new process waits for its assignment (`spare`). It is forked twice, so that the agent (a subreaper)
becomes its parent and can wait for it. When the agent vanishes, the zygote ends what the job left behind, then itself;
so the agent ends it by SIGKILL, never by closing the socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from ridethrough.generation.wire import Decoder, encode
from ridethrough.launch import spare
from ridethrough.launch.linux import die_with_parent, kill_tree

_ADOPTION_LIMIT_S = 5.0


def main() -> None:
    channel, agent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    job_mark, folder, *modules = sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    with _told_of_the_end_of(agent, job_mark, folder):
        ready = _prepare(modules)
    with contextlib.suppress(ConnectionError):
        channel.sendall(encode(ready))
        _serve(channel, agent)
    _clean_up(job_mark, folder)


@contextlib.contextmanager
def _told_of_the_end_of(agent: int, job_mark: str, folder: str) -> Iterator[None]:
    """While the imports run nobody reads the socket: a signal tells. Later it is ignored."""

    def on_signal(number: int, frame: object) -> None:
        if os.getppid() != agent:
            _clean_up(job_mark, folder)
            os._exit(0)

    signal.signal(signal.SIGTERM, on_signal)
    die_with_parent(agent, signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _prepare(modules: list[str]) -> dict[str, Any]:
    """Imports what workers need; returns what the agent must know to decide whether forking is safe."""
    started = time.monotonic()
    failed = {}
    culprits: list[str] = []
    for name in (*spare.PRELOAD, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises when it is imported
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
    """Until the agent is gone."""
    decoder = Decoder()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 4096, 1)
        if not data:
            return
        (request,) = decoder.feed(data)  # what carries a descriptor is received alone
        (fd,) = fds
        answer = {"fork": request["fork"], "pid": 0, "why": ""}
        try:
            answer["pid"] = _fork_spare(channel, fd, agent)
        except OSError as error:
            answer["why"] = f"the zygote cannot fork: {error}"
        os.close(fd)
        channel.sendall(encode(answer))


def _fork_spare(channel: socket.socket, fd: int, agent: int) -> int:
    """A process that waits at the socket `fd`; returns its pid."""
    read, write = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            with contextlib.suppress(OSError):
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    _become_spare(fd, agent)
                os.write(write, str(pid).encode())
            os._exit(0)
    finally:
        os.close(write)
        told = os.read(read, 32)
        os.close(read)
    os.waitpid(middle, 0)
    if not told:
        raise OSError("no process was made")
    return int(told)


def _become_spare(fd: int, agent: int) -> NoReturn:
    try:
        os.closerange(3, fd)
        os.closerange(fd + 1, 65536)
        _wait_for_adoption(agent)
        die_with_parent(agent)
        os.setsid()
        spare.wait(socket.socket(fileno=fd))
    except BaseException:  # nothing may come back from here into the zygote's loop
        traceback.print_exc()
    os._exit(70)


def _wait_for_adoption(agent: int) -> None:
    """The middle process is about to end; its end makes the agent our parent."""
    middle = os.getppid()
    if middle != agent:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            pidfd = os.pidfd_open(middle)
            select.select([pidfd], [], [], _ADOPTION_LIMIT_S)
            os.close(pidfd)


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
