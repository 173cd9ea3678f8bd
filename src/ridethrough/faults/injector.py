"""Fires the planned faults of one rank, each exactly once per job.

Named in RIDETHROUGH_OBSERVERS as `ridethrough.faults.injector:install`; called with the Run at the start of each
generation. Once means once per job, over restarts, replaced processes and other ranks: a fault first creates
`fired/<id>` exclusively and fires only if that succeeded. Without a planned fault for this rank nothing is observed,
so a step costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ridethrough.faults import missing_collective
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.phases import OCCASIONAL_PHASES, RECOVERY_PHASES
from ridethrough.faults.schedule import Fault, Schedule
from ridethrough.faults.shot import SCHEDULE_VARIABLE, RunLike, Shot
from ridethrough.faults.storage import FILE_HOOK, FILE_HOOK_VARIABLE, IN_KEEPER

OBSERVER = "ridethrough.faults.injector:install"

_last_step = 0  # furthest step this process has been in, over all its generations


def environment(schedule: Schedule, path: Path) -> dict[str, str]:
    """What workers and keeper need to suffer the schedule, which lies at `path`."""
    variables = {SCHEDULE_VARIABLE: str(path), "RIDETHROUGH_OBSERVERS": OBSERVER}
    if any(fault.kind in IN_KEEPER for fault in schedule.faults):
        variables[FILE_HOOK_VARIABLE] = FILE_HOOK
    return variables


def install(run: RunLike) -> None:
    """Arm this rank's faults that have not fired yet. Main thread, at a generation's start.

    Raises ScheduleError if the schedule cannot be read, FaultRefused if a fault must not fire on this machine.
    """
    missing_collective.disarm()  # of a generation that ended before its collective came by
    path = os.environ.get(SCHEDULE_VARIABLE)
    if not path:
        return
    schedule = Schedule.load(Path(path))
    fired_dir = (run.run_dir or Path(path).absolute().parent) / "fired"
    pending = [f for f in schedule.faults if f.rank == run.rank and not (fired_dir / f.id).exists()]
    for fault in pending:
        KINDS[fault.kind].guard(fault.args)
    if pending:
        Injector(run, schedule, pending, fired_dir)


class Injector:
    """The pending faults of one rank in one generation. Lives in the main thread only."""

    def __init__(self, run: RunLike, schedule: Schedule, pending: list[Fault], fired_dir: Path) -> None:
        self._run = run
        self._hash = schedule.hash
        self._pending = pending
        self._fired_dir = fired_dir
        self._followers: list[Callable[[str, int], bool]] = []
        fired = [f.step for f in schedule.faults if (fired_dir / f.id).exists()]
        self._recovering_from = max([_last_step, *fired])
        self._first_step_seen = False
        run.observe(self.on_phase)

    def on_phase(self, phase: str, step: int) -> None:
        """Fire what is due at this entry. May raise, hang or kill: that is what it is for."""
        global _last_step
        if phase in ("step", "data", "forward", "backward", "optimizer"):
            _last_step = max(_last_step, step)
        if self._followers:
            self._followers = [follower for follower in self._followers if not follower(phase, step)]
        due = [fault for fault in self._pending if self._is_due(fault, phase, step)]
        if phase == "step":
            self._first_step_seen = True
        for fault in due:
            self._pending.remove(fault)
            if self._claim(fault):
                self._fire(fault, phase, step)

    def _is_due(self, fault: Fault, phase: str, step: int) -> bool:
        if fault.phase in RECOVERY_PHASES:
            enters = phase == fault.phase or (
                fault.phase == "first_step" and phase == "step" and not self._first_step_seen
            )
            return enters and fault.step <= self._recovering_from
        if fault.phase in OCCASIONAL_PHASES:
            return phase == fault.phase and step >= fault.step
        # A script that does not mark this phase would never fire it: then the start of the next step does.
        return (phase == fault.phase and step == fault.step) or (phase == "step" and step > fault.step)

    def _claim(self, fault: Fault) -> bool:
        self._fired_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self._fired_dir / fault.id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        os.close(fd)
        return True

    def _fire(self, fault: Fault, phase: str, step: int) -> None:
        self._run.record("fault_injected", id=fault.id, fault_kind=fault.kind, phase=phase, step=step)
        name = (
            f"fault {fault.id} ({fault.kind}) on rank {fault.rank}, step {step}, phase {phase}, schedule {self._hash}"
        )
        KINDS[fault.kind].fire(Shot(name, fault.args, phase, step, self._followers.append))
