"""The object given to the training function: who this rank is, where its steps begin and end, what is recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ridethrough.health.heartbeat import HeartbeatPage
from ridethrough.ledger.recorder import Recorder
from ridethrough.restart.generation import Place, Stage
from ridethrough.restart.interrupt import Interrupter

# Phase -> the ledger's state while it lasts; a phase that is not here is part of the step.
_STATE = {"data": "data_wait", "eval": "eval", "save": "snapshot_stall", "load": "restore"}
_LONG = frozenset({"load", "eval", "save"})
_SHORTEST_PART_NS = 50_000
_SHORTEST_SAVE_NS = 1_000_000

PhaseCallback = Callable[[str, int], None]


class _Checkpointer(Protocol):
    def step(self, step: int) -> Any: ...
    def save(self, step: int, durable: bool = True) -> Any: ...
    def close(self, timeout_s: float = ...) -> None: ...


class Run:
    """One generation, seen from one rank. Made by `rt.run`; all methods are for the main thread unless they say so.

    `rank`, `local_rank` and `world_size` may change from generation to generation; `device` is the rank's GPU
    (`cuda:local_rank`) or the CPU. `run_dir` is the run's folder under the launcher, else None.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        stage: Stage,
        *,
        run_dir: Path | None,
        recorder: Recorder,
        page: HeartbeatPage | None,
        interrupter: Interrupter | None,
    ) -> None:
        self.generation = place.generation
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.world_size = place.world_size
        self.device = device
        self.run_dir = run_dir
        self.resume = place.resume
        self.step = 0
        self.stopped = False
        self._stage = stage
        self._recorder = recorder
        self._page = page
        self._interrupter = interrupter
        self._observers: list[PhaseCallback] = []
        self._on_leave: list[Callable[[], None]] = []
        self._phase = "init"
        self._parts: list[tuple[str, int, int]] = []
        self._metrics: dict[str, Any] = {}
        self._in_loop = False
        self._first = False

    # --- for the training function -----------------------------------------------------------------------------------

    def steps(self, start: Any, total: int, checkpoint: _Checkpointer | None = None) -> Iterator[int]:
        """Yields the steps that are left: start+1 .. total, counted from 1.

        `start` is the number of finished steps, or what `Checkpointer.load()` returned; that checkpointer (or
        `checkpoint`) is then told of each finished step, and of the end. A step ends when control comes back here:
        only then is a fault's end of the generation, or a planned stop, obeyed without interrupting anything.
        Raises LeaveGeneration when the generation is over.
        """
        keeper = checkpoint if checkpoint is not None else getattr(start, "checkpointer", None)
        done = int(getattr(start, "step", start))
        self._in_loop = True
        begun_ns = time.monotonic_ns()
        self.record("loop", t_ns=begun_ns, step=done, total=total)
        last_ns = 0
        while done < total and self._stage.begin(done + 1):
            self._begin_step(done + 1, begun_ns, last_ns)
            yield done + 1
            done += 1
            ended_ns = time.monotonic_ns()
            self._end_step(done, begun_ns, ended_ns)
            last_ns = ended_ns - begun_ns
            begun_ns = self._save(keeper, done, ended_ns)
        self.stopped = done < total
        self._in_loop = False
        self._finish(keeper, done)

    def phase(self, name: str) -> _Phase:
        """Marks a part of the work: `with run.phase("eval"):`. Names are those of the ledger: init, load, data,
        forward, backward, optimizer, save, eval. Gives it a time limit of its own and a place in the ledger."""
        return _Phase(self, name)

    def log(self, **metrics: float) -> None:
        """Attaches numbers (loss=, tokens=) to the step in progress; they are written when it ends."""
        self._metrics.update(metrics)

    def record(self, kind: str, *, t_ns: int | None = None, **fields: Any) -> None:
        """Appends an event to the ledger, with generation and rank. Any thread."""
        self._recorder.emit(kind, t_ns=t_ns, generation=self.generation, rank=self.rank, **fields)

    def observe(self, callback: PhaseCallback) -> None:
        """`callback(phase, step)` is called in the main thread whenever a phase begins; "step" when a step does."""
        self._observers.append(callback)

    def on_leave(self, callback: Callable[[], None]) -> None:
        """`callback()` runs in the main thread after the training function was left because of a fault, before the
        process groups are destroyed. It must not communicate: the groups are cut."""
        self._on_leave.append(callback)

    def heartbeat(self) -> None:
        """Says that the rank is alive in a long stretch of its own: the time limit of what it is in counts anew."""
        if self._page is not None:
            self._page.alive(time.monotonic_ns())
        self._stage.check()

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A section that no interrupt may cut. It delays a recovery; after its limit the process is replaced."""
        if self._interrupter is None:
            yield
            return
        self._interrupter.hold()
        try:
            yield
        finally:
            self._interrupter.let_go()
        self._stage.check()

    @property
    def stopping(self) -> bool:
        """A planned stop (Ctrl-C, SIGTERM, preemption) is under way: `steps` will end by itself."""
        return self._stage.stopping

    # --- for the session ---------------------------------------------------------------------------------------------

    def notify(self, phase: str, step: int | None = None) -> None:
        """Tells the observers that a phase begins."""
        for callback in self._observers:
            callback(phase, self.step if step is None else step)

    def leave(self) -> None:
        """Runs the callbacks of `on_leave`; one that raises does not keep the others from running."""
        while self._on_leave:
            try:
                self._on_leave.pop()()
            except Exception as error:
                self.record("leave_callback_failed", cause=f"{type(error).__name__}: {error}")

    def enter_phase(self, name: str) -> int:
        now = time.monotonic_ns()
        if self._page is not None:
            self._page.enter(name, now)
        self._phase = name
        return now

    @property
    def current_phase(self) -> str:
        return self._phase

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin_step(self, step: int, begun_ns: int, last_ns: int) -> None:
        self.step = step
        first_ended, self._first = self._first, not last_ns
        self._phase = "first_step" if self._first else "step"
        if self._page is not None:
            self._page.step(step, begun_ns, last_ns, learn=not first_ended)
            self._page.enter(self._phase, begun_ns)
        if self._observers:
            self.notify("step")

    def _end_step(self, step: int, begun_ns: int, ended_ns: int) -> None:
        self.record(
            "step",
            t_ns=ended_ns,
            step=step,
            t0_ns=begun_ns,
            t1_ns=ended_ns,
            parts=[p for p in self._parts if p[2] > begun_ns],
            **self._metrics,
        )
        self._parts.clear()
        self._metrics.clear()

    def _save(self, keeper: _Checkpointer | None, step: int, ended_ns: int) -> int:
        """Tells the checkpointer of a finished step; returns when the next step begins."""
        if keeper is None:
            return ended_ns
        self.enter_phase("save")
        if self._observers:
            self.notify("save")
        keeper.step(step)
        now = time.monotonic_ns()
        if now - ended_ns < _SHORTEST_SAVE_NS:
            return ended_ns  # it goes with the next step: two more events would cost more than they tell
        self.record("phase", t_ns=ended_ns, phase="save", edge="begin", step=step)
        self.record("phase", t_ns=now, phase="save", edge="end", step=step)
        return now

    def _finish(self, keeper: _Checkpointer | None, step: int) -> None:
        self.enter_phase("finish")
        self.record("finish", step=step, stopped=self.stopped)
        if keeper is not None:
            keeper.save(step, durable=True)
            keeper.close()
        self._stage.check()

    def _phase_ended(self, name: str, begun_ns: int) -> None:
        ended_ns = time.monotonic_ns()
        if name in _LONG:
            self.record("phase", t_ns=ended_ns, phase=name, edge="end", step=self.step)
        state = _STATE.get(name)
        if state is not None and self._in_loop and ended_ns - begun_ns >= _SHORTEST_PART_NS:
            self._parts.append((state, begun_ns, ended_ns))


class _Phase:
    """One `with run.phase(...)`; phases may be nested, the inner one counts."""

    __slots__ = ("_begun_ns", "_name", "_outer", "_run")

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._outer, self._begun_ns = "", 0

    def __enter__(self) -> None:
        run = self._run
        run._stage.check()
        self._outer = run.current_phase
        self._begun_ns = run.enter_phase(self._name)
        if self._name in _LONG:
            run.record("phase", t_ns=self._begun_ns, phase=self._name, edge="begin", step=run.step)
        if run._observers:
            run.notify(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:  # a fault keeps its phase: the incident names it
            self._run._phase_ended(self._name, self._begun_ns)
            self._run.enter_phase(self._outer)
