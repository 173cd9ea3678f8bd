"""Recovery as the product decides it: the real generation machine, with simulated agents and workers around it.

The machine's answers come after the times that they take in a real job: a store opens at once, a new process is ready
after the rebuild of its rung, survivors are out after the teardown. Time is the simulation's; nothing here waits.
"""

from __future__ import annotations

import heapq
import itertools
import random

from ridethrough.bench.simulation_model import Fleet, Mechanism
from ridethrough.bench.simulation_peers import Recovery
from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.policy import Policy

_TICKS_S = (0.25, 1.0, 5.0, 30.0)


class MachineRecovery:
    """One job's machine. `known_s` is the last moment that it has been told."""

    def __init__(self, fleet: Fleet, mechanism: Mechanism, policy: Policy | None = None) -> None:
        self.fleet, self.mechanism = fleet, mechanism
        self.per_node = max(1, fleet.gpus_per_node // fleet.group)
        self.policy = policy or Policy(
            # A job of weeks meets more failures than the defaults allow, so a budget is forgiven with progress, and a
            # repaired host comes back with another name.
            last_call_s=0.0,
            forgive_after_steps=1,
            max_rank_faults=10_000,
            max_cheap_in_window=10_000,
            max_costly_in_window=10_000,
            node_wait_s=max(300.0, 2 * fleet.repair_s),
            start_limit_s=1e9,
            rebuild_limit_s=1e9,
        )
        self.machine = GenerationMachine(
            num_workers=self.per_node, min_nodes=fleet.num_nodes, max_nodes=fleet.num_nodes, policy=self.policy
        )
        self.known_s = 0.0
        self._queue: list[tuple[float, int, m.Event]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._called_s: float | None = None
        self._out_s = 0.0
        self._ended: str | None = None
        self._rung = "in_process"
        self._workers: dict[str, tuple[str, ...]] = {}  # of the present plan, by node

    # --- the job's start ---------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> str | None:
        """All nodes and spares join, everybody starts at once."""
        for _ in range(self.fleet.num_nodes + self.fleet.num_spares):
            self._later(now_s, self._joins())
        return self._until_called().ended

    def progressed(self, step: int, now_s: float) -> None:
        """The machine hears of the steps, as from the heartbeat pages."""
        event = m.Progress(node="", generation=self.machine.generation, step=step)
        self._tell(event, now_s)

    def recover(self, kind: str, fault_s: float, step: int, draw: random.Random) -> Recovery:
        """A random victim fails at `fault_s`; returns when the next plan's ranks are in the training function."""
        times = self.mechanism.times
        plan = self.machine.plan
        assert plan is not None
        node = plan.nodes[draw.randrange(len(plan.nodes))]
        worker = node.workers[draw.randrange(len(node.workers))]
        declared_s = fault_s + times.detect_s.get(kind, 0.0)
        self._called_s, self._out_s = None, declared_s
        self._rung = {"node_loss": "replace_node", "sigkill": "replace_process"}.get(kind, "in_process")
        if kind == "node_loss":
            self._later(declared_s, m.NodeLeft(node=node.node, lost=True))
            self._later(fault_s + self.fleet.repair_s, self._joins())
        else:
            report = FaultReport(
                generation=self.machine.generation,
                worker=worker,
                node=node.node,
                fault_class="sigkill" if kind == "sigkill" else "hang" if kind == "hang" else "exception",
                detected_by={"sigkill": "waitpid", "hang": "heartbeat"}.get(kind, "exception"),
                step=step + 1,
                cause=f"SimulatedError{next(self._names)}: {kind}",
                signal=9 if kind == "sigkill" else None,
            )
            gone = kind == "sigkill"
            event: m.Event = m.WorkerExited(worker=worker, report=report) if gone else m.WorkerFaulted(report=report)
            self._later(declared_s, event)
        found = self._until_called()
        return Recovery(declared_s, max(declared_s, self._out_s), found.called_s, found.ended)

    # --- the machine's surroundings ----------------------------------------------------------------------------------

    def _joins(self) -> m.NodeJoined:
        name = next(self._names)
        return m.NodeJoined(node=f"n{name}", name=f"host{name}", num_workers=self.per_node)

    def _later(self, at_s: float, event: m.Event) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), event))

    def _until_called(self) -> Recovery:
        """Lets time pass until all have entered, or the job has ended."""
        idle_s = 0.0
        while self._called_s is None and self._ended is None:
            tick_s = next((tick for tick in _TICKS_S if idle_s < 20 * tick), _TICKS_S[-1])
            due_s = self._queue[0][0] if self._queue else float("inf")
            if due_s <= self.known_s + tick_s:
                _, _, event = heapq.heappop(self._queue)
                self._tell(event, max(due_s, self.known_s))
                idle_s = 0.0 if not isinstance(event, m.NodeJoined) else idle_s
            else:
                self._tell(m.Tick(), self.known_s + tick_s)
                idle_s += tick_s
        return Recovery(self._out_s, self._out_s, self._called_s or self.known_s, self._ended)

    def _tell(self, event: m.Event, now_s: float) -> None:
        self.known_s = max(self.known_s, now_s)
        for action in self.machine.handle(event, self.known_s):
            self._act(action, self.known_s)

    def _act(self, action: m.Action, now_s: float) -> None:
        times = self.mechanism.times
        if isinstance(action, m.OpenStore):
            self._later(now_s, m.StoreOpened(serial=action.serial, endpoint=f"{action.node}:1"))
        elif isinstance(action, m.Spawn):
            rebuild_s = 0.0 if self.machine.generation == 0 else times.rebuild_s.get(self._rung, 0.0)
            extra_s = rebuild_s - times.rebuild_s.get("in_process", 0.0)
            self._later(now_s + times.teardown_s + max(0.0, extra_s), m.WorkerReady(worker=action.worker))
        elif isinstance(action, m.Leave):
            for worker_id in self._workers.get(action.node, ()):
                self._later(now_s + times.teardown_s, m.WorkerReady(worker=worker_id, left=action.generation))
        elif isinstance(action, m.AllOut):
            self._out_s = now_s
        elif isinstance(action, m.Enter):
            if self._called_s is None:
                first = self.machine.generation == 1
                self._called_s = now_s + (0.0 if first else times.rebuild_s.get("in_process", 0.0))
            self._workers[action.node] = action.plan.workers
            for worker_id in action.plan.workers:
                self._later(self._called_s, m.WorkerEntered(worker=worker_id, generation=action.plan.generation))
        elif isinstance(action, m.JobDone):
            self._ended = f"code {action.code}: {action.reason}"
