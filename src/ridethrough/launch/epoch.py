"""A coordinator's claim to a job: a number above every earlier coordinator's, made durable by exclusive create."""

from __future__ import annotations

import os
from pathlib import Path


class ClaimLost(RuntimeError):
    """Another coordinator has claimed the job since; this one must not plan any more."""


def claim_epoch(run_dir: Path) -> int:
    """Claims the next epoch in the run's folder, which all coordinators of the job share. Raises OSError."""
    folder = run_dir / "epochs"
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        epoch = newest_epoch(run_dir) + 1
        try:
            fd = os.open(folder / f"{epoch}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        try:
            os.write(fd, f"{os.uname().nodename} {os.getpid()}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        return epoch


def newest_epoch(run_dir: Path) -> int:
    """The highest claim so far; -1 if there is none."""
    names = os.listdir(run_dir / "epochs") if (run_dir / "epochs").is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def check_claim(run_dir: Path, epoch: int) -> None:
    """To be called before each plan. Raises ClaimLost."""
    newest = newest_epoch(run_dir)
    if newest > epoch:
        raise ClaimLost(f"a coordinator of epoch {newest} has taken over from epoch {epoch}")
