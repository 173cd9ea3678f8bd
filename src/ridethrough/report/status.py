"""What a run is doing now, as one record: terminal, dashboard and metrics show the same figures. Pure but `read`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ridethrough.ledger.history import History
from ridethrough.ledger.incidents import Incident, percentile
from ridethrough.ledger.partition import Partition
from ridethrough.ledger.reading import LedgerError
from ridethrough.ledger.rundir import RunDir
from ridethrough.ledger.steps import STATE_NAMES
from ridethrough.ledger.summary import RunLedger, read_run
from ridethrough.report.live import life
from ridethrough.report.saves import Saves, saves
from ridethrough.report.stragglers import Straggler, rank_times, stragglers

_WINDOW = 50  # steps that rates are taken from


@dataclass(frozen=True)
class RankNow:
    """`state`: a state of the ledger, `partial_step` while it computes. `step`: its last finished one."""

    rank: int
    state: str
    step: int
    since_s: float  # since its last finished step
    step_s: float | None  # median of the last ones


@dataclass
class Status:
    """Seconds are floats; None: not known (yet). `state`: starting, running, recovering, ended, died."""

    run_id: str
    state: str
    code: int | None
    reason: str | None
    step: int
    total: int | None
    loss: float | None
    tokens_per_s: float | None
    step_s: float | None
    eta_s: float | None
    generation: int
    num_ranks: int
    wall_s: float
    training_goodput: float
    infrastructure_goodput: float
    unattributed: float
    lost: dict[str, float]  # share of the time in each state but `step`, the largest first
    num_incidents: int
    num_recovered: int
    num_injected: int
    causes: dict[str, int]
    restarts: int
    max_restarts: int | None
    steps_lost: int
    recovery_p50_s: float | None  # from the fault to the first new step
    recovery_max_s: float | None
    cost_gpu_h: float  # of all recovered incidents together
    recurring_rank: int | None
    open_incident: dict[str, Any] | None
    saves: Saves
    stragglers: list[Straggler]
    ranks: list[RankNow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        data = {**vars(self), "saves": self.saves.as_json()}
        data["stragglers"] = [asdict(s) for s in self.stragglers]
        data["ranks"] = [asdict(rank) for rank in self.ranks]
        return data


def read_status(run_dir: Path) -> Status:
    """Read a run's folder. A run without any event yet is `starting`. Raises RunDirError or LedgerError."""
    alive = life(run_dir)
    try:
        ledger = read_run(run_dir, alive.end_ns)
    except LedgerError as error:
        if "no events" in str(error) or "no event names a rank" in str(error):
            return _starting(run_dir)
        raise
    return status_of(ledger, running=alive.running)


def status_of(ledger: RunLedger, *, running: bool) -> Status:
    """`running`: some process of the run lives."""
    part, past, found = ledger.part, ledger.past, ledger.incidents
    result = ledger.run["result"]
    now_ns = part.end_ns
    generation = past.generations[-1] if past.generations else None
    ranks = _ranks(ledger, now_ns)
    step = max((rank.step for rank in ranks), default=0)
    open_one = found[-1] if found and not found[-1].recovered and result is None else None
    state = "ended" if result is not None or past.jobs[-1].ended else "running" if running else "died"
    if state == "running":
        state = "recovering" if open_one is not None else "running" if step else "starting"
    times = stragglers(rank_times(ledger.steps))
    step_s, loss, tokens_per_s = _newest(ledger)
    took_s = [i.first_step_s for i in found if i.first_step_s is not None]
    total = looped_total(past) or total_steps(ledger.run["config"])
    left = total - step if total is not None and state == "running" else None
    return Status(
        run_id=ledger.run["run_id"],
        state=state,
        code=result["code"] if result is not None else None,
        reason=result["reason"] if result is not None else None,
        step=step,
        total=total,
        loss=loss,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        eta_s=left * step_s if left is not None and step_s is not None else None,
        generation=generation.number if generation is not None else 0,
        num_ranks=part.slots,
        wall_s=part.wall_ns / 1e9,
        training_goodput=part.training_goodput,
        infrastructure_goodput=part.infrastructure_goodput,
        unattributed=part.unattributed,
        lost=_lost(part),
        num_incidents=len(found),
        num_recovered=sum(i.recovered for i in found),
        num_injected=sum(bool(i.injected) for i in found),
        causes=dict(Counter(i.class_ for i in found).most_common()),
        restarts=sum(i.attempts for i in found if i.rung not in (None, "give_up")),
        max_restarts=_int(ledger.run["config"].get("max_restarts")),
        steps_lost=sum(i.steps_lost or 0 for i in found),
        recovery_p50_s=percentile(took_s, 50) if took_s else None,
        recovery_max_s=max(took_s, default=None),
        cost_gpu_h=sum(part.slots * i.cost_s / 3600 for i in found if i.cost_s is not None),
        recurring_rank=recurring_rank(found),
        open_incident=open_one.as_json() if open_one is not None else None,
        saves=saves(ledger.events, now_ns=now_ns, step=step),
        stragglers=times,
        ranks=ranks,
    )


def recurring_rank(found: list[Incident], times: int = 3) -> int | None:
    """The rank that caused at least `times` incidents, and more than half of those that have a rank."""
    counts = Counter(i.rank for i in found if i.rank is not None)
    if not counts:
        return None
    rank, count = counts.most_common(1)[0]
    return rank if count >= times and count > sum(counts.values()) / 2 else None


def _lost(part: Partition) -> dict[str, float]:
    total = max(1, part.wall_ns * part.slots)
    shares = {state: ns / total for state, ns in part.states_ns.items() if state != "step" and ns}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _ranks(ledger: RunLedger, now_ns: int) -> list[RankNow]:
    ranks = []
    for slot, picture in enumerate(ledger.part.pictures):
        newest = next((g.steps[slot] for g in reversed(ledger.past.generations) if slot in g.steps), None)
        state = STATE_NAMES[picture.state[-1]] if len(picture.state) else "queued"
        if newest is None:
            ranks.append(RankNow(slot, state, 0, ledger.part.wall_ns / 1e9, None))
            continue
        took = (newest.t1_ns[-_WINDOW:] - newest.t0_ns[-_WINDOW:]) / 1e9
        since_s = (now_ns - int(newest.t1_ns[-1])) / 1e9
        ranks.append(RankNow(slot, state, int(newest.step[-1]), since_s, float(np.median(took))))
    return ranks


def _newest(ledger: RunLedger) -> tuple[float | None, float | None, float | None]:
    """Seconds a step, loss and tokens per second over the last steps of the newest generation, of its lowest rank."""
    for generation in reversed(ledger.past.generations):
        if not generation.steps:
            continue
        steps = generation.steps[min(generation.steps)]
        t0, t1 = steps.t0_ns[-_WINDOW:], steps.t1_ns[-_WINDOW:]
        took_s = int(t1[-1] - t0[0]) / 1e9
        loss, tokens = steps.metric("loss"), steps.metric("tokens")
        rate = float(np.nansum(tokens[-_WINDOW:])) / took_s if tokens is not None and took_s > 0 else None
        last = float(loss[-1]) if loss is not None and np.isfinite(loss[-1]) else None
        return float(np.median(t1 - t0)) / 1e9, last, rate
    return None, None, None


def looped_total(past: History) -> int | None:
    """How many steps the newest step loop was asked for."""
    for generation in reversed(past.generations):
        for slot in generation.by_slot:
            loop = generation.first("loop", slot)
            if loop is not None:
                return _int(loop.get("total"))
    return None


def _starting(run_dir: Path) -> Status:
    run = RunDir.open(run_dir).run_json()
    result = run["result"]
    return Status(
        run_id=run["run_id"],
        state="starting" if result is None else "ended",
        code=result["code"] if result is not None else None,
        reason=result["reason"] if result is not None else None,
        step=0,
        total=total_steps(run["config"]),
        loss=None,
        tokens_per_s=None,
        step_s=None,
        eta_s=None,
        generation=0,
        num_ranks=0,
        wall_s=0.0,
        training_goodput=0.0,
        infrastructure_goodput=0.0,
        unattributed=0.0,
        lost={},
        num_incidents=0,
        num_recovered=0,
        num_injected=0,
        causes={},
        restarts=0,
        max_restarts=None,
        steps_lost=0,
        recovery_p50_s=None,
        recovery_max_s=None,
        cost_gpu_h=0.0,
        recurring_rank=None,
        open_incident=None,
        saves=Saves(),
        stragglers=[],
    )


def total_steps(config: dict[str, Any]) -> int | None:
    """How many steps the job will do, where its config says so."""
    train = config.get("train")
    return _int(config.get("steps")) or (_int(train.get("steps")) if isinstance(train, dict) else None)


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
