"""The worker's side of the generations: ready, plan, enter, train, leave, and again until the job is done."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from ridethrough import checkpoint
from ridethrough.generation.exit_codes import REPLACE_ME
from ridethrough.health.heartbeat import STACK_SIGNAL, HeartbeatPage
from ridethrough.ledger.recorder import Recorder
from ridethrough.restart import gate, loaders, script_groups
from ridethrough.restart.compiled import forget_compiled
from ridethrough.restart.exceptions import LeaveGeneration, classify, describe, fatality, is_cut_collective
from ridethrough.restart.generation import Place, Stage
from ridethrough.restart.groups import Groups
from ridethrough.restart.interrupt import Interrupter
from ridethrough.restart.link import Link
from ridethrough.restart.monitor import Monitor
from ridethrough.restart.run_object import Run
from ridethrough.restart.well import Unfit, Wellness

_T = TypeVar("_T")
_KILL_WAIT_S = 10.0
_PLAN_WAIT_S = 5.0
_SLOW_COLLECTION_S = 0.2


class Session:
    """Made by `rt.run` in the main thread. Owns the link, the heartbeat page and the monitor thread; they live as long
    as the process, because a finished rank may be called back until all have finished."""

    def __init__(self, *, process_group: bool, timeout_s: float, check: Callable[[], object] | None = None) -> None:
        self._process_group = process_group
        self._timeout_s = timeout_s
        run_dir = os.environ.get("RIDETHROUGH_RUN_DIR")
        self._run_dir = Path(run_dir) if run_dir else None
        self._recorder = Recorder(self._run_dir, "worker")
        self._page = HeartbeatPage(Path(os.environ["RIDETHROUGH_HEARTBEAT"]))
        self._worker = os.environ["RIDETHROUGH_WORKER"]
        self._stacks = self._register_stacks()
        self._interrupter = Interrupter()
        self._link = Link(os.environ["RIDETHROUGH_AGENT"], self._worker)
        self._monitor = Monitor(self._link, self._page, self._interrupter)
        self._left = 0
        self._left_by = ""
        self._error: BaseException | None = None
        self._baseline = gate.baseline()
        self._wellness = Wellness(self._run_dir, check)
        self._finished_a_step = False
        self._slow_to_collect = False
        self._result: Any = None

    def loop(self, train: Callable[[Run], _T]) -> _T:
        """Returns the function's result once every rank has finished."""
        script_groups.adopt(train)
        gc.collect()
        gc.freeze()
        self._monitor.start()
        while True:
            ready = {"t": "ready", "generation": self._left, "left_by": self._left_by, "inventory": {}}
            self._link.send(ready)
            message = self._next({"plan", "done"})
            if message["t"] == "done":
                self._end_of_job(message["code"])
            place = Place.from_message(message)
            if self._generation(train, place):
                result = self._result
                self._result = None
                return result  # type: ignore[no-any-return]
            if self._slow_to_collect:
                gc.freeze()  # what is alive now lives on: the next collection need not look at it again
            self._left = place.generation
            self._page.stamp("generation", 0)
            self._page.enter("outside", time.monotonic_ns())

    def _generation(self, train: Callable[[Run], _T], place: Place) -> bool:
        """One generation in a function of its own, so that no local of it survives; True when the job is done."""
        stage = Stage(place.generation)
        policy = place.policy
        groups = Groups(place.master_port, policy.abort_limit(place.world_size))
        self._monitor.watch(stage, groups, policy)
        self._enter(place)
        run = Run(
            place,
            device_of(place),
            stage,
            run_dir=self._run_dir,
            recorder=self._recorder,
            page=self._page,
            interrupter=self._interrupter,
        )
        checkpoint.set_recorder(run.record)
        error = self._call(train, run, place, groups)
        if error is None and self._finished(run, stage, groups):
            return True
        self._left_by = _left_by(error)
        if error is not None:
            self._report(error, run, stage)
        loaders.end_workers()
        self._error = _without_frames(error)
        parts = [("unwound", time.monotonic_ns())]
        self._leave(run, stage, groups, place, parts)
        why = gate.why_not(self._baseline, error, aborted=groups.aborted, limit_s=policy.gate_limit_s)
        unfit = self._wellness.look(run.record, policy, why)
        run.record("left", parts=[*parts, ("gate", time.monotonic_ns())])
        if unfit is not None:
            self._ask_to_be_replaced(unfit)
        return False

    def _end_of_job(self, code: int) -> NoReturn:
        """The job ended without this rank's result. Where no launcher tells why, this rank's own error does."""
        if self._error is not None and "RIDETHROUGH_SIDE" in os.environ:
            raise self._error
        raise SystemExit(code)

    def _ask_to_be_replaced(self, unfit: Unfit) -> None:
        """The agent kills this process; what it has to say must not be lost in its last moments."""
        print(f"ridethrough: this process is replaced: {unfit.why}", flush=True)
        self._link.send({"t": "replace", "why": unfit.why, "node": unfit.node})
        time.sleep(_KILL_WAIT_S)
        os._exit(REPLACE_ME)  # the agent did not kill it in time

    def _enter(self, place: Place) -> None:
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.local_rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_WORLD_SIZE=str(place.local_world_size),
            GROUP_RANK=str(place.group_rank),
            MASTER_ADDR=place.master_addr,
            MASTER_PORT=str(place.master_port),
            TORCHELASTIC_RESTART_COUNT=str(place.restarts),
            TORCHELASTIC_USE_AGENT_STORE="True",
            RIDETHROUGH_GENERATION=str(place.generation),
            RIDETHROUGH_EPOCH=str(place.epoch),
            RIDETHROUGH_OLDER_THAN=str(place.resume.get("older_than") or ""),
        )
        self._page.stamp("generation", place.generation)
        self._page.stamp("last_step_ns", 0)
        self._page.stamp("step", 0)
        self._page.enter("recovery", time.monotonic_ns())

    def _call(self, train: Callable[[Run], _T], run: Run, place: Place, groups: Groups) -> BaseException | None:
        """Makes the groups and calls the function; what came out of it, or None."""
        try:
            self._interrupter.arm()
            try:
                for install in observers():
                    install(run)
                if place.generation > 1:
                    run.enter_phase("recovery")
                    run.notify("recovery")
                groups.attend()
                loaders.attend()
                if self._process_group:
                    run.enter_phase("group")
                    groups.open(
                        host=place.master_addr,
                        prefix=place.prefix,
                        rank=place.rank,
                        world_size=place.world_size,
                        device=run.device,
                        timeout_s=self._timeout_s,
                    )
                    script_groups.claim(place.rank, place.world_size)
                    groups.bury()
                self._wellness.meet_gpu()
                self._link.send({"t": "entered", "generation": place.generation})
                run.record("enter")
                run.enter_phase("init")
                run.notify("init")
                self._result = train(run)
            finally:
                self._interrupter.disarm()
        except BaseException as error:
            self._interrupter.disarm()
            return error
        finally:
            script_groups.release()
        return None

    def _finished(self, run: Run, stage: Stage, groups: Groups) -> bool:
        """Waits until every rank has finished; False if a fault elsewhere calls this one back."""
        self._finished_a_step = True
        self._page.enter("held", time.monotonic_ns())
        self._link.send({"t": "finished", "generation": run.generation, "step": run.step, "stopped": run.stopped})
        message = self._next({"done", "leave"})
        if message["t"] == "leave":
            return False
        stage.left.set()
        run.record("exit", code=message["code"])
        groups.close()
        return True

    def _report(self, error: BaseException, run: Run, stage: Stage) -> None:
        """Tells the agent what happened here, unless this rank only obeyed, and frees the peers."""
        stage.left.set()
        first = run.generation == 1 and not self._finished_a_step and run.step <= 1
        if isinstance(error, LeaveGeneration):
            run.record("leave", cause="told to leave")
            return
        told = describe(error)
        report = {
            "generation": run.generation,
            "rank": run.rank,
            "fault_class": "collective" if stage.over and classify(error) == "collective" else classify(error),
            "detected_by": "collective" if classify(error) == "collective" else "exception",
            "phase": "recovery" if run.current_phase == "group" else run.current_phase,
            "step": run.step or None,
            "fatal": fatality(error, first=first and not stage.over),
            "fault_ns": time.monotonic_ns(),
            **told,
        }
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            report["exit_code"] = error.code
        self._link.send({"t": "fault", "worker": self._worker, "report": report})
        self._monitor.cut(stage)
        run.record("leave", cause=told["cause"])

    def _leave(self, run: Run, stage: Stage, groups: Groups, place: Place, parts: list[tuple[str, int]]) -> None:
        """Everything of the old generation goes: callbacks, snapshots, groups, meshes, garbage. `parts` gets the moment
        at which each was gone."""
        stage.left.set()
        self._monitor.cut(stage)
        parts.append(("cut", time.monotonic_ns()))
        run.leave()
        if "ridethrough.checkpoint.checkpointer" in sys.modules:
            checkpoint.abandon(place.generation)
        self._result = None
        parts.append(("state", time.monotonic_ns()))
        groups.close()
        forget_compiled()
        begun_s = time.monotonic()
        gc.collect()
        self._slow_to_collect = time.monotonic() - begun_s > _SLOW_COLLECTION_S
        parts.append(("groups", time.monotonic_ns()))

    def _next(self, kinds: set[str]) -> dict[str, Any]:
        """The agent's next word. Waits as long as the agent lives: the monitor ends the process when it is gone."""
        while True:
            try:
                message = self._monitor.inbox.get(timeout=_PLAN_WAIT_S)
            except queue.Empty:
                continue
            if message["t"] == "refused":
                raise ConnectionError(message["why"])
            if message["t"] in kinds:
                return message

    def _register_stacks(self) -> int:
        """`faulthandler` writes all threads' stacks on demand, also when the interpreter is stuck."""
        page = self._page.path
        path = page.with_name(page.name.replace("heartbeat-", "stacks-", 1))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
        return fd


def _left_by(error: BaseException | None) -> str:
    """How this rank came out of the generation: a rank that came to a safe point by itself was not hung."""
    if isinstance(error, LeaveGeneration):
        return "interrupt" if error.interrupted else "safe_point"
    if error is None:
        return "finished"
    return "cut" if classify(error) == "collective" else "fault"


def _without_frames(error: BaseException | None) -> BaseException | None:
    """The error with its traceback as a note: frames would keep the generation's tensors and groups alive."""
    if error is None or isinstance(error, LeaveGeneration) or is_cut_collective(error):
        kept = None
    else:
        kept = error
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if hasattr(error, "add_note") and not getattr(error, "__notes__", None):
            error.add_note(f"raised in the training function:\n{text}")
    if error is not None:
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return kept


def device_of(place: Place) -> torch.device:
    """The rank's GPU, made current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def observers() -> list[Callable[[Run], None]]:
    """The functions named in RIDETHROUGH_OBSERVERS ("module:function,..."), as the launcher set it."""
    found = []
    for name in filter(None, os.environ.get("RIDETHROUGH_OBSERVERS", "").split(",")):
        module, _, function = name.partition(":")
        found.append(getattr(importlib.import_module(module), function))
    return found
