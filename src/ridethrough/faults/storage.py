"""Storage that damages, delays or refuses what is saved.

`corrupt_save` changes a committed checkpoint on disk. The other two leave a note beside the schedule; the keeper, which
does all the writing, reads it before each of its file operations (`file_hook`, named in RIDETHROUGH_FILE_HOOK by
`injector.environment`). So no disk is filled, and what the keeper meets is what the operating system would have said.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridethrough.checkpoint import inspect, layout
from ridethrough.checkpoint.errors import DamagedCheckpoint
from ridethrough.faults.shot import SCHEDULE_VARIABLE, FaultRefused, InjectedFault, Shot

FILE_HOOK_VARIABLE = "RIDETHROUGH_FILE_HOOK"
FILE_HOOK = "ridethrough.faults.storage:file_hook"
IN_KEEPER = ("slow_storage", "full_storage")
_TAKES_SPACE = ("allocate", "write")


def corrupt_save(shot: Shot) -> None:
    """Flip one byte in the newest committed checkpoint, read it back, and raise what is found. Waits, a look at each
    phase, until there are two: one has to be left."""

    def strike(phase: str, step: int) -> bool:
        from ridethrough.checkpoint.checkpointer import live_roots

        for root in live_roots():
            attempts = [attempt for attempt in layout.scan(root) if attempt.state == "committed"]
            if len(attempts) > 1:
                _flip_a_byte(attempts[0])
                found = inspect.verify(attempts[0])
                if not found:
                    raise InjectedFault(f"injected {shot.fault}: {attempts[0].path} was changed and is still believed")
                raise DamagedCheckpoint(f"injected {shot.fault}: {found}")
        return False

    if not strike(shot.phase, shot.step):
        shot.follow(strike)


def _flip_a_byte(attempt: layout.Attempt) -> None:
    """In the middle of the largest data file."""
    path = max(attempt.path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def guard_file_hook(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused if the keeper was started without our hook: the fault would do nothing."""
    if os.environ.get(FILE_HOOK_VARIABLE) != FILE_HOOK:
        raise FaultRefused(
            f"fault kinds slow_storage and full_storage need {FILE_HOOK_VARIABLE}={FILE_HOOK} from the start; "
            "`ridethrough run` and `train` set it when the schedule has them"
        )


def slow_storage(shot: Shot) -> None:
    """Each file operation of this node's saves takes `extra_s` longer, for `seconds`."""
    _leave_note(shot, extra_s=float(shot.args["extra_s"]))


def full_storage(shot: Shot) -> None:
    """What takes space in this node's saves fails with ENOSPC, for `seconds`."""
    _leave_note(shot, errno=errno.ENOSPC)


def file_hook(operation: str, path: str) -> None:
    """Called by the keeper before each file operation, on its writer threads."""
    try:
        note = json.loads(_note().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    if time.time() > note["until"]:
        return
    time.sleep(note.get("extra_s", 0.0))
    if "errno" in note and operation in _TAKES_SPACE:
        raise OSError(note["errno"], os.strerror(note["errno"]), path)


def _note() -> Path:
    return Path(os.environ[SCHEDULE_VARIABLE]).with_name(f"storage-{os.uname().nodename}.json")


def _leave_note(shot: Shot, **what: float) -> None:
    draft = _note().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"until": time.time() + float(shot.args["seconds"]), **what}), encoding="utf-8")
    draft.replace(_note())
