"""Run as a worker: `python standin.py RUN_DIR RANK STEPS [GENERATION]` walks through the phases of a job with a
stand-in Run, so that the injector is tested without the rooms above it. SIGUSR1 raises Freed in the main thread, as a
restart in process does. Prints one JSON line per thing that happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridethrough.faults import injector
from ridethrough.faults.shot import InjectedFault


class Freed(BaseException):
    """What the restart room's signal handler would raise."""


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")
    sys.stdout.flush()


class StandInRun:
    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.callbacks: list[Callable[[str, int], None]] = []

    def record(self, kind: str, **fields: Any) -> None:
        say(event=kind, rank=self.rank, **fields)

    def observe(self, callback: Callable[[str, int], None]) -> None:
        self.callbacks.append(callback)

    def enter(self, phase: str, step: int) -> None:
        for callback in self.callbacks:
            callback(phase, step)


def walk(run: StandInRun, start: int, steps: int) -> None:
    """Steps start+1..steps with a save every 10 steps and an evaluation every 5."""
    for step in range(start + 1, steps + 1):
        run.enter("step", step)
        for phase in ("data", "forward", "backward", "optimizer"):
            run.enter(phase, step)
        if step % 5 == 0:
            run.enter("eval", step)
        if step % 10 == 0:
            run.enter("save", step)


def main() -> None:
    run_dir, rank, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def free(*_: object) -> None:
        raise Freed

    signal.signal(signal.SIGUSR1, free)

    def beat() -> None:
        while True:
            (run_dir / f"beat-{rank}").touch()
            time.sleep(0.02)

    threading.Thread(target=beat, daemon=True).start()
    last_step = 0
    for generation in range(20):
        run = StandInRun(run_dir, rank)
        injector.install(run)
        try:
            if generation > 0:
                run.enter("recovery", last_step)
            run.enter("init", 0)
            run.enter("load", 0)
            walk(run, 0, steps)
            break
        except InjectedFault as error:
            say(left="exception", cause=str(error))
            last_step = steps
        except Freed:
            say(left="freed")
            last_step = steps
    say(finished=steps)


if __name__ == "__main__":
    main()
