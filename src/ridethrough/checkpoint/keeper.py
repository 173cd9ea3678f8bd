"""python -m ridethrough.checkpoint.keeper --socket PATH [--run-dir DIR] [--exit-when-idle]

The keeper: one small process per node that maps the workers' snapshot arenas and turns them into committed
checkpoints. It outlives workers, so that what was staged is committed even if every rank dies. It prints
nothing, knows no torch, and is niced.

Threads: `main` accepts; `rt-client-*`, one per worker, reads its messages; `rt-job` writes, commits and
prunes, one attempt at a time, with a bounded pool of writers. SIGTERM: no new saves, what is complete is
finished within --grace seconds, and so is the newest state that is held in memory alone; then exit 0. SIGUSR1: write
that state now. It also ends when the process that started it is gone, or with
--exit-when-idle, once no worker is connected and nothing is left to write. A second keeper on the same socket
exits at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ridethrough.checkpoint import fileops
from ridethrough.checkpoint.keeping import Keeping
from ridethrough.checkpoint.kept import Client
from ridethrough.checkpoint.telling import Telling
from ridethrough.generation import peer
from ridethrough.generation.socket_folder import hold
from ridethrough.ledger.recorder import Recorder

IDLE_EXIT_S = 3.0
FOLLOW_S = 5.0  # when told to end: so long may rank 0's keeper take to begin writing what only memory holds


class Keeper(Keeping):
    """A keeping that knows when it is over."""

    def __init__(self, path: Path, recorder: Recorder, *, exit_when_idle: bool, grace_s: float) -> None:
        super().__init__(path, recorder, grace_s)
        self.exit_when_idle = exit_when_idle
        self.parent = os.getppid()

    def finished(self) -> bool:
        """Whether to exit now (asked by the main thread a few times a second)."""
        with self.wake:
            now = time.monotonic()
            follow = self.flushing and (self.stopping is None or now - self.stopping < FOLLOW_S)
            writing = any(not g.idle for g in self.groups.values() if g.leads or follow)
            busy = self.current is not None or writing
            if self.stopping is not None:
                return not busy or now - self.stopping > self.grace_s
            if self.clients or busy:
                return False
            orphan = os.getppid() != self.parent
            return (self.exit_when_idle or orphan) and now - self.last_client > IDLE_EXIT_S


def listen(path: Path) -> tuple[socket.socket, int] | None:
    """Bind the socket under a lock on `<socket>.lock`; None when another keeper has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        os.chmod(path.parent, 0o700)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    hold(path.parent)  # until this process ends: it may outlive whoever made the folder
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(old)
    server.listen(64)
    server.settimeout(0.25)
    return server, lock


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ridethrough.checkpoint.keeper", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("--exit-when-idle", action="store_true")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish writes after SIGTERM")
    parser.add_argument(
        "--address", default="", help="this node's own, for other nodes' keepers; the token is on stdin"
    )
    parser.add_argument("--replicas", type=int, choices=(0, 1), default=1, help="other nodes that hold a copy")
    parser.add_argument("--replica-rate", type=float, default=0.0, help="bytes per second at most; 0: no limit")
    args = parser.parse_args(argv)
    token = sys.stdin.readline().strip() if args.address else ""
    bound = listen(args.socket)
    if bound is None:
        return 0
    server, lock = bound
    with contextlib.suppress(OSError):
        os.nice(10)
    fileops.hook_from_environment("RIDETHROUGH_FILE_HOOK")
    keeper = Keeper(
        args.socket, Recorder(args.run_dir, "keeper"), exit_when_idle=args.exit_when_idle, grace_s=args.grace
    )
    if args.address:
        from ridethrough.checkpoint.neighbours import Neighbours  # what one node does not need

        keeper.neighbours = Neighbours(keeper, args.address, token, args.replicas, args.replica_rate)
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    signal.signal(signal.SIGUSR1, lambda *_: keeper.flush())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=keeper.work, name="rt-job", daemon=True).start()
    telling = Telling(keeper)
    while not keeper.finished():
        telling.base()
        telling.weight()
        try:
            sock, _ = server.accept()
        except (TimeoutError, InterruptedError):
            continue
        sock.settimeout(None)
        if not peer.is_ours(sock):
            sock.close()
            continue
        client = Client(sock)
        with keeper.wake:
            keeper.clients.add(client)
        threading.Thread(target=keeper.serve, args=(client,), name=f"rt-client-{sock.fileno()}", daemon=True).start()
    telling.weight(last=True)
    server.close()
    for leftover in (args.socket, Path(f"{args.socket}.lock")):
        with contextlib.suppress(OSError):
            os.unlink(leftover)
    if args.exit_when_idle:
        log = args.socket.parent / "keeper.log"
        with contextlib.suppress(OSError):
            if log.stat().st_size == 0:
                os.unlink(log)
            os.rmdir(args.socket.parent)
    os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
