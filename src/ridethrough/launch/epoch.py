"""What outlives a coordinator in the run's folder: its claim to the job, and which generation may still train.

A claim is a number above every earlier coordinator's, made durable by exclusive create.
"""

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
            os.write(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        return epoch


def newest_epoch(run_dir: Path) -> int:
    """The highest claim so far; -1 if there is none."""
    names = os.listdir(run_dir / "epochs") if (run_dir / "epochs").is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def note_planned(run_dir: Path, generation: int) -> None:
    """A plan is about to go out: from now on a world may train, whatever becomes of this coordinator."""
    new = _planned(run_dir).with_suffix(".new")
    new.write_text(f"{generation}\n")
    new.replace(_planned(run_dir))


def planned_before(run_dir: Path) -> int:
    """The generation that an earlier coordinator has planned last, if the job has not ended since; else 0."""
    try:
        return int(_planned(run_dir).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def forget_planned(run_dir: Path, epoch: int) -> None:
    """The job has ended. Nothing happens if that is a word of a coordinator whose claim is lost."""
    if newest_epoch(run_dir) <= epoch:
        _planned(run_dir).unlink(missing_ok=True)


def _planned(run_dir: Path) -> Path:
    return run_dir / "epochs" / "planned"


def check_claim(run_dir: Path, epoch: int) -> None:
    """To be called before each plan. Raises ClaimLost, whose message names the newer holder."""
    newest = newest_epoch(run_dir)
    if newest > epoch:
        holder = (run_dir / "epochs" / f"{newest}").read_text().strip() or "not named yet"
        run = run_dir.name
        raise ClaimLost(f"run {run}: a coordinator of epoch {newest} has taken over from epoch {epoch}: {holder}")
