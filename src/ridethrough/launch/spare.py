"""A process that has imported everything, belongs to no rank, and waits to be told whose place it takes.

Every worker begins like this unless it must be executed. The agent holds the other end of its socket: one message, with
the two output pipes, makes it a worker; the end of the socket ends it. The zygote forks such processes. Where forking
is not safe, `python -m ridethrough.launch.spare FD AGENT MODULES...` imports for itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import signal
import socket
import sys
from typing import Any, NoReturn

from ridethrough.generation.wire import Decoder
from ridethrough.launch.linux import die_with_parent
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


def wait(channel: socket.socket) -> NoReturn:
    """Waits for the assignment, then runs the worker's program. Main thread of a session of its own, whose parent is
    the agent."""
    decoder = Decoder()
    with channel:
        data, pipes, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        while not (messages := decoder.feed(data)):
            data = channel.recv(1 << 20) if data else b""
            if not data:
                os._exit(0)
    _become_worker(messages[0], *pipes)


def _become_worker(assignment: dict[str, Any], out: int, err: int) -> NoReturn:
    for pipe, fd in ((out, 1), (err, 2)):
        os.dup2(pipe, fd)
        os.close(pipe)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        own = getattr(sys, f"__{name}__")
        stream = io.TextIOWrapper(raw, own.encoding, own.errors, line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(assignment["env"])
    os.chdir(assignment["cwd"])
    _reseed()
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # what `-m` put there for the process that did the imports
    run_as_main(assignment["command"])


def _reseed() -> None:
    """Forked workers would all draw the same numbers; a fresh interpreter draws from the system."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main() -> None:
    channel, agent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(agent)
    os.setsid()
    for name in (*PRELOAD, *sys.argv[3:]):
        with contextlib.suppress(Exception):  # the zygote has told the agent what cannot be imported
            importlib.import_module(name)
    wait(channel)


if __name__ == "__main__":
    main()
