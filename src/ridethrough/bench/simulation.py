"""A discrete-event simulation of one job on a fleet that fails, by the product's own parts.

`ridethrough` is simulated by the real generation machine with its real policy: the simulation plays the agents and the
workers, answers the machine's actions after the times that they take, and lets failures strike. Pods wait by the
kubelet's rules of room `cluster`. What happened is written as events of the ledger, and states and goodputs come from
the ledger's own partition of one rank slot: all ranks of such a job are in step, so it stands for every one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridethrough.bench.simulation_machine import MachineRecovery
from ridethrough.bench.simulation_model import Fleet, Mechanism, Planned
from ridethrough.bench.simulation_peers import WholeJobRecovery
from ridethrough.bench.simulation_saver import Saver
from ridethrough.ledger.history import history
from ridethrough.ledger.incidents import history_incidents, percentile
from ridethrough.ledger.partition import partition_history
from ridethrough.ledger.reading import Event

NS = 1_000_000_000


@dataclass
class Outcome:
    """What one simulated run came to. `states_s` is of one rank slot and sums to `wall_s`."""

    mechanism: str
    num_gpus: int
    wall_s: float
    steps: int
    states_s: dict[str, float]
    training_goodput: float
    infrastructure_goodput: float
    num_failures: dict[str, int]
    steps_lost: int
    first_step_s: dict[str, float] | None
    saves: dict[str, float]
    ended: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Simulation:
    """One run. Failures are drawn by `seed` from the fleet's rates, or `planned` ones strike, or both. Whatever the
    mechanism, the drawn ones strike at the same moments and are of the same kinds."""

    def __init__(self, fleet: Fleet, mechanism: Mechanism, seed: int = 0, planned: Sequence[Planned] = ()) -> None:
        self.fleet, self.mechanism = fleet, mechanism
        self._fate = random.Random(seed)
        self._victims = random.Random(seed + 1)
        self.planned = sorted(planned, key=lambda fault: fault.step)
        self.saver = Saver(mechanism.saving)
        self.events: list[Event] = []
        self.now_s = 0.0
        self.step = 0  # finished ones, on the present time line
        self.generation = 0
        self.failures: dict[str, int] = {}
        kind = MachineRecovery if mechanism.rungs else WholeJobRecovery
        self.recovery: MachineRecovery | WholeJobRecovery = kind(fleet, mechanism)
        self._next_s, self._next_kind = self._draw(0.0)

    def run(self) -> Outcome:
        """Until all steps are done, the time is over, or the policy gives up."""
        times = self.mechanism.times
        self.emit("job_start", slots=1, nodes=1, run_id="simulated")
        ended = self.recovery.start(self.now_s)
        self.now_s += times.launch_s
        while ended is None:
            self._enter()
            kind = self._train()
            if kind is None:
                break
            ended = self._recover(kind)
        if ended is None and self.step >= self.fleet.total_steps:
            self.emit("finish", step=self.step, generation=self.generation, rank=0)
            drain_s = self.saver.drain_s(self.step, self.now_s)
            self.now_s += max(times.finish_s, drain_s)
            ended = "done"
        self.emit("job_end", code=0, reason=ended or "horizon")
        return self._outcome(ended or "the time is over")

    def emit(self, kind: str, at_s: float | None = None, **fields: Any) -> None:
        t_ns = round((self.now_s if at_s is None else at_s) * NS)
        self.events.append({"kind": kind, "t_ns": t_ns, "role": "worker", **fields})

    # --- one generation ----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.generation += 1
        where, times = {"generation": self.generation, "rank": 0}, self.mechanism.times
        self.emit("enter", **where)
        self.now_s += times.init_s
        self.emit("phase", phase="load", edge="begin", step=0, **where)
        self.now_s += times.restore_s
        self.emit("phase", phase="load", edge="end", step=self.step, **where)
        self.emit("resumed", step=self.step, **where)
        self.emit("loop", step=self.step, **where)

    def _train(self) -> str | None:
        """Steps until a failure (returns its kind) or the end (None)."""
        where, times, fleet = {"generation": self.generation, "rank": 0}, self.mechanism.times, self.fleet
        first = True
        while self.step < fleet.total_steps and self.now_s < fleet.horizon_s:
            begun_s = self.now_s
            took_s = times.step_s + (times.first_step_s if first else 0.0)
            due = self.planned[0] if self.planned and self.planned[0].step == self.step + 1 else None
            planned_s = begun_s + min(due.into_s, took_s) if due is not None else float("inf")
            struck_s = min(planned_s, self._next_s)
            if struck_s <= begun_s + took_s:
                self.now_s = max(struck_s, begun_s)
                if due is not None and planned_s <= self._next_s:
                    self.planned.pop(0)
                    return due.kind
                return self._strikes()
            self.now_s = begun_s + took_s
            self.step += 1
            t0_ns, t1_ns = round(begun_s * NS), round(self.now_s * NS)
            self.emit("step", step=self.step, t0_ns=t0_ns, t1_ns=t1_ns, parts=[], **where)
            if first:
                self.recovery.progressed(self.step, self.now_s)
                first = False
            blocked_s = self.saver.boundary(self.step, self.now_s)
            if blocked_s > 0:
                self.emit("phase", phase="save", edge="begin", step=self.step, **where)
                self.now_s += blocked_s
                self.emit("phase", phase="save", edge="end", step=self.step, **where)
        return None

    # --- a failure ---------------------------------------------------------------------------------------------------

    def _recover(self, kind: str) -> str | None:
        """From the failure to the next call of the training function; returns why the job ended, if it did."""
        fault_s, generation = self.now_s, self.generation
        self.failures[kind] = self.failures.get(kind, 0) + 1
        self.recovery.progressed(self.step, fault_s)
        found = self.recovery.recover(kind, fault_s, self.step, self._victims)
        while self._next_s < found.called_s and found.ended is None:
            # Another failure before the training function is called again: that recovery begins anew.
            again_s, again = self._next_s, self._strikes()
            self.failures[again] = self.failures.get(again, 0) + 1
            following = self.recovery.recover(again, max(again_s, self.recovery.known_s), self.step, self._victims)
            found = found.joined(following)
        report = {"generation": generation, "rank": 0, "class": kind, "phase": "step", "step": self.step + 1}
        report |= {"cause": kind, "detected_by": "user", "fault_ns": round(fault_s * NS), "root": True, "pid": 0}
        self.emit("fault", found.declared_s, worker="", host="simulated", **report)
        self.emit("all_out", found.out_s, generation=generation)
        lives = self.mechanism.rungs and kind != "node_loss"
        self.step = self.saver.at_fault(self.step, fault_s if not lives else found.called_s, kind, lives)
        self.saver.resumed(self.step)
        self.now_s = found.called_s
        return found.ended

    def _strikes(self) -> str:
        """The kind of the drawn failure that is due now; the next one is drawn."""
        kind = self._next_kind
        self._next_s, self._next_kind = self._draw(self._next_s)
        return kind

    def _draw(self, after_s: float) -> tuple[float, str]:
        kinds = sorted(self.fleet.rates)
        if self.fleet.mtbf_s == float("inf"):
            return float("inf"), ""
        gap_s = self._fate.expovariate(1 / self.fleet.mtbf_s)
        return after_s + gap_s, self._fate.choices(kinds, [self.fleet.rates[kind] for kind in kinds])[0]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _outcome(self, ended: str) -> Outcome:
        past = history(self.events)
        part = partition_history(past)
        found = history_incidents(past)
        firsts = [incident.first_step_s for incident in found if incident.first_step_s is not None]
        tails = {f"p{p}": percentile(firsts, p) for p in (50, 95, 99)} if firsts else None
        return Outcome(
            mechanism=self.mechanism.name,
            num_gpus=self.fleet.num_gpus,
            wall_s=part.wall_ns / NS,
            steps=self.step,
            states_s={state: ns / NS for state, ns in part.states_ns.items() if ns},
            training_goodput=part.training_goodput,
            infrastructure_goodput=part.infrastructure_goodput,
            num_failures=dict(sorted(self.failures.items())),
            steps_lost=sum(incident.steps_lost or 0 for incident in found),
            first_step_s={**tails, "max": max(firsts)} if tails is not None else None,
            saves={
                "written": self.saver.written,
                "superseded": self.saver.superseded,
                "oldest_s": self.saver.oldest_s,
            },
            ended=ended,
        )


def simulate(fleet: Fleet, mechanism: Mechanism, seed: int = 0, planned: Sequence[Planned] = ()) -> Outcome:
    """One run, from its start to its end."""
    return Simulation(fleet, mechanism, seed, planned).run()
