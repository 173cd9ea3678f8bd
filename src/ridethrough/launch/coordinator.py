"""Runs the generation machine: events come in from the agents, actions go back to them, everything is recorded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridethrough.generation import messages as m
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.machine import GenerationMachine
from ridethrough.launch.epoch import ClaimLost, check_claim, forget_planned, note_planned
from ridethrough.launch.inquest import Inquest
from ridethrough.ledger.recorder import Recorder

_TICK_S = 0.05


class Coordinator:
    """`deliver(node, action)`, to be set before the first event, sends an action to a node's agent. All methods run on
    one event loop, in one thread."""

    def __init__(self, machine: GenerationMachine, recorder: Recorder, run_dir: Path) -> None:
        self.machine = machine
        self._run_dir = run_dir
        self.deliver: Callable[[str, m.Action], None] = lambda node, action: None
        self._recorder = recorder
        self._pids: dict[str, int] = {}
        self._queue: list[m.Event] = []
        self._busy = False
        self._all_out_ns: int | None = None
        self._inquest = Inquest(lambda ask: self.deliver(ask.node, ask), self._convicted)
        self.last_incident: m.IncidentDecided | None = None
        self.deposed = ""
        self.done: asyncio.Future[m.JobDone] = asyncio.get_running_loop().create_future()

    def post(self, event: m.Event) -> None:
        """Takes an event, from anywhere on the loop; also from within `deliver`."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                self._handle(self._queue.pop(0))
        finally:
            self._busy = False

    async def tick(self) -> None:
        """Runs until cancelled: limits are noticed within a twentieth of a second."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.post(m.Tick())
            except Exception as error:  # without ticks no limit would ever pass: the job ends instead
                self._end(ExitCode.RESTARTS_EXHAUSTED, f"the coordinator failed: {type(error).__name__}: {error}")
                raise

    def _convicted(self, report: FaultReport) -> None:
        self.post(m.WorkerFaulted(report=report))

    def _handle(self, event: m.Event) -> None:
        if self.deposed:
            return
        plan = self.machine.plan
        if isinstance(event, m.HangSuspected):
            if plan is not None and self.machine.phase == "running":
                self._inquest.open(event, plan)
            return
        if isinstance(event, m.Inspected):
            self._inquest.answer(event)
            return
        for action in self.machine.handle(event, time.monotonic()):
            try:
                self._act(action)
            except ClaimLost as error:
                self._stand_down(str(error))
                return

    def _act(self, action: m.Action) -> None:
        if isinstance(action, m.AllOut):
            self._all_out_ns = time.monotonic_ns()
            self._recorder.emit("all_out", t_ns=self._all_out_ns, generation=action.generation)
        elif isinstance(action, m.IncidentDecided):
            self._record_incident(action)
        elif isinstance(action, m.FaultDeclared):
            self._record_fault(action.report)
        elif isinstance(action, m.Dismiss):
            self.deliver(action.node, m.JobDone(code=action.code, reason=action.reason))
        elif isinstance(action, m.JobDone):
            if not self.done.done():
                self.done.set_result(action)
            forget_planned(self._run_dir, self.machine.epoch)
        else:
            if isinstance(action, m.Enter) and action.plan.place == 0:
                check_claim(self._run_dir, self.machine.epoch)
                self._record_plan()
            self.deliver(action.node, action)

    def _stand_down(self, why: str) -> None:
        """Another coordinator plans now: this one says nothing more to anybody (`deposed` says why). Whoever starts it
        again would depose the other in turn, so its code says not to."""
        self.deposed = why
        self._end(ExitCode.FATAL, why)

    def _end(self, code: int, why: str) -> None:
        if not self.done.done():
            self.done.set_result(m.JobDone(code=code, reason=why))

    def _record_plan(self) -> None:
        plan = self.machine.plan
        assert plan is not None
        try:
            note_planned(self._run_dir, plan.generation)
        except OSError as error:
            why = "a coordinator that takes over would not wait for this world"
            print(
                f"ridethrough coordinator: {error.filename or self._run_dir}: {error.strerror}; {why}", file=sys.stderr
            )
        members = [
            {"rank": rank, "local_rank": local_rank, "node": node, "worker": worker}
            for rank, local_rank, node, worker in plan.members()
        ]
        self._recorder.emit(
            "plan",
            generation=plan.generation,
            epoch=plan.epoch,
            world_size=plan.world_size,
            members=members,
            resume=plan.resume,
        )

    def _record_fault(self, report: FaultReport) -> None:
        self._recorder.emit(
            "fault",
            generation=report.generation,
            rank=report.rank,
            worker=report.worker,
            host=report.node,
            pid=report.pid,
            phase=report.phase,
            step=report.step,
            cause=report.cause,
            detected_by=report.detected_by,
            fault_ns=report.fault_ns,
            traceback=report.traceback,
            **_class(report),
        )

    def _record_incident(self, action: m.IncidentDecided) -> None:
        self.last_incident = action
        root = action.root
        self._recorder.emit(
            "incident",
            id=action.id,
            rank=root.rank,
            host=root.node,
            phase=root.phase,
            step=root.step,
            generation=action.generation,
            rung=action.rung,
            detected_by=root.detected_by,
            attempts=action.attempts,
            root_cause=root.traceback or root.cause,
            why=action.why,
            declared_ns=root.declared_ns,
            fault_ns=root.fault_ns,
            all_out_ns=self._all_out_ns,
            secondary=[{"rank": r.rank, "class": r.fault_class, "cause": r.cause} for r in action.secondary],
            **_class(root),
        )


def _class(report: FaultReport) -> dict[str, Any]:
    return {"class": report.fault_class}  # a keyword of Python, so it cannot be written as an argument
