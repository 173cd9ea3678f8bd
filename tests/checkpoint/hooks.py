"""File hooks for keepers that tests start: RIDETHROUGH_FILE_HOOK=hooks:<name>. Each reads what it needs from
the environment."""

import os
import signal
import threading
import time
from pathlib import Path


def slow(operation: str, path: str) -> None:
    """Storage that takes SLOW_S for each write of data; a `gate` file in the environment lets it run freely."""
    if operation == "write" and path.endswith("_0.distcp") and not os.path.exists(os.environ.get("GATE", "/nowhere")):
        time.sleep(float(os.environ["SLOW_S"]))


def die_once(operation: str, path: str) -> None:
    """SIGKILL for the keeper at operation DIE_AT on a path with DIE_ON in it; the file DIED keeps the next
    one alive."""
    if operation == os.environ["DIE_AT"] and os.environ["DIE_ON"] in path and not os.path.exists(os.environ["DIED"]):
        Path(os.environ["DIED"]).touch()
        os.kill(os.getpid(), 9)


_operations = 0


def die_in_step_6(operation: str, path: str) -> None:
    """SIGKILL for the keeper at file operation KILL_AT of step 6, or KILL_AFTER seconds after its first one."""
    global _operations
    if "step-6" not in path:
        return
    _operations += 1
    if "KILL_AFTER" in os.environ and _operations == 1:
        threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    if str(_operations) == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)


def fail(operation: str, path: str) -> None:
    """OSError FAIL_ERRNO at operation FAIL_AT on paths with FAIL_ON, while the file FAILING exists."""
    if operation == os.environ["FAIL_AT"] and os.environ["FAIL_ON"] in path and os.path.exists(os.environ["FAILING"]):
        number = int(os.environ["FAIL_ERRNO"])
        raise OSError(number, os.strerror(number), path)


def hang(operation: str, path: str) -> None:
    """Storage that does not answer at all while the file HANGING exists."""
    while os.path.exists(os.environ["HANGING"]):
        time.sleep(0.05)
