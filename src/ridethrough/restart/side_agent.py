"""`rt.run` without `ridethrough run`: local rank 0 of each node starts an agent beside the ranks, the others find it.

The agent is a process of its own (`python -m ridethrough.launch.sidecar`). It replaces nobody: it makes the ranks leave
and enter together, so exceptions and blocked collectives are survived. A rank that is gone stays gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridethrough.generation.messages import PROTOCOL
from ridethrough.generation.socket_folder import socket_root
from ridethrough.generation.wire import Decoder, encode
from ridethrough.restart.launched_by import Ranks, where

TOKEN_FILE_VARIABLE = "RIDETHROUGH_TOKEN_FILE"
PORT_VARIABLE = "RIDETHROUGH_PORT"
_NEVER_REPLACE = {"node_wait_s": 0.0, "replace_process_after": 1_000_000, "replace_node_after": 1_000_000}
_FIND_LIMIT_S = 120.0
_TRY_S = 0.02


def join(*, max_restarts: int, min_world_size: int | None) -> None:
    """Finds or starts the node's agent and takes what it says into the environment, as a launcher would have set it.
    Main thread. Raises RuntimeError with the remedy if ranks of several nodes have no token, or no agent answers."""
    ranks = where(os.environ)
    if ranks.num_nodes > 1:
        _check_several_nodes(ranks)
    folder = _folder(ranks)
    if ranks.local_rank == 0:
        _start(ranks, folder, max_restarts, min_world_size or ranks.world_size)
    told = _ask(folder / "agent.sock", ranks)
    for name in ("RIDETHROUGH_TOKEN", TOKEN_FILE_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(
        RIDETHROUGH_AGENT=str(folder / "agent.sock"),
        RIDETHROUGH_WORKER=told["worker"],
        RIDETHROUGH_HEARTBEAT=told["heartbeat"],
        RIDETHROUGH_SIDE="1",
    )
    if told["run_dir"]:
        os.environ.setdefault("RIDETHROUGH_RUN_DIR", told["run_dir"])


def _check_several_nodes(ranks: Ranks) -> None:
    if not (os.environ.get(TOKEN_FILE_VARIABLE) or os.environ.get("RIDETHROUGH_TOKEN")):
        raise RuntimeError(
            f"rt.run over {ranks.num_nodes} nodes needs the job's token: write one to a file that every node can read "
            f"(openssl rand -hex 32 > FILE) and set {TOKEN_FILE_VARIABLE}=FILE, or start with ridethrough run"
        )
    if not ranks.host:
        raise RuntimeError("rt.run over several nodes needs MASTER_ADDR, the name of rank 0's node: set it")


def _folder(ranks: Ranks) -> Path:
    """The same for all ranks of this launch on this node, and for nobody else."""
    name = f"{os.getuid()}.{ranks.job}.{ranks.host}.{ranks.port}.{os.getpid() if ranks.by == 'plain' else ''}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return socket_root() / f"ridethrough-side-{digest}"


def _start(ranks: Ranks, folder: Path, max_restarts: int, min_world_size: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # of a launch that was killed
        if folder.stat().st_uid != os.getuid():
            raise RuntimeError(f"{folder} belongs to somebody else: set TMPDIR to a folder of your own")
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    config: dict[str, Any] = {
        "folder": str(folder),
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
        "node_rank": ranks.node_rank,
        "num_nodes": ranks.num_nodes,
        "host": ranks.host,
        "port": int(os.environ.get(PORT_VARIABLE) or ranks.port + 1),
        "token_file": os.environ.get(TOKEN_FILE_VARIABLE),
        "runs": os.environ.get("RIDETHROUGH_RUNS"),
        "command": sys.argv,
        "policy": {"max_restarts": max_restarts, **_NEVER_REPLACE, **_policy()},
        "min_world_size": min_world_size,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ridethrough.launch.sidecar"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode())
    process.stdin.close()
    process.returncode = 0  # it outlives this rank if it has to; nobody waits for it


def _policy() -> dict[str, Any]:
    path = os.environ.get("RIDETHROUGH_POLICY")
    return dict(json.loads(Path(path).read_text())) if path else {}


def _ask(path: Path, ranks: Ranks) -> dict[str, Any]:
    end = time.monotonic() + _FIND_LIMIT_S
    trouble = "it is not there"
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_FIND_LIMIT_S)
            try:
                sock.connect(str(path))
                sock.sendall(
                    encode({"t": "join", "protocol": PROTOCOL, "rank": ranks.rank, "local_rank": ranks.local_rank})
                )
                return _answer(sock)
            except OSError as error:
                trouble = str(error)
        time.sleep(_TRY_S)
    raise RuntimeError(
        f"the node's agent does not answer at {path} ({trouble}): is local rank 0 running on this node, with the same "
        "TMPDIR?"
    )


def _answer(sock: socket.socket) -> dict[str, Any]:
    decoder = Decoder()
    while data := sock.recv(1 << 16):
        for message in decoder.feed(data):
            if message["t"] == "refused":
                raise RuntimeError(message["why"])
            return message
    raise ConnectionError("it closed the connection")
