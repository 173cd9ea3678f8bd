"""Where the Unix sockets of one launch are: a private folder whose path is short enough for them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LONGEST = 62  # of the parent: a Unix socket's path has 107 bytes at most, on every Linux


def socket_root() -> Path:
    """The temporary folder (TMPDIR), or /tmp where that one's path is too long."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(str(chosen).encode()) <= _LONGEST else Path("/tmp")


def socket_folder() -> Path:
    """Makes a folder of mode 0700 that nobody else can guess; its maker removes it. Removes first what makers that were
    killed have left. Raises OSError."""
    sweep_folders()
    return Path(tempfile.mkdtemp(prefix=f"ridethrough-{os.getpid()}-", dir=socket_root()))


def hold(folder: Path) -> int:
    """A descriptor; as long as it is open nobody sweeps the folder, whatever becomes of its maker."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def sweep_folders() -> None:
    """Removes folders of ours whose maker is gone and that nobody holds.

    A maker that is not seen may live in another PID namespace that shares the temporary folder: the lock decides."""
    for folder in [
        each for root in {Path(tempfile.gettempdir()), Path("/tmp")} for each in root.glob("ridethrough-*-*")
    ]:
        pid = folder.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):  # another one sweeps too
            if pid.isdigit() and _is_gone(int(pid)) and folder.stat().st_uid == os.getuid() and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    return False


def _is_held(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
