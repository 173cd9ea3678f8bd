"""Prometheus metrics of runs, in the text format, from their events. Pure functions; no client library.

Everything is counted from the run's own record, so that no counter falls when a worker, a node or this process is
started anew. Labels are few: the run, and a class, a state, a tier or a save's event. There is no series per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ridethrough.ledger.history import History
from ridethrough.ledger.incidents import Incident
from ridethrough.report.status import Status

Labels = dict[str, str]


@dataclass(frozen=True)
class Metric:
    """One family; `samples` are (labels, value)."""

    name: str
    kind: str  # counter or gauge
    help: str
    samples: list[tuple[Labels, float]]


@dataclass(frozen=True)
class Counts:
    """What only grows: finished steps (done again ones each time) and the tokens that they logged; incidents by class,
    restarts and lost steps of the incidents that have been decided (before, their class may still change)."""

    steps: int
    tokens: float
    incidents: dict[str, int]
    restarts: int
    steps_lost: int
    recoveries: int


NOTHING = Counts(0, 0.0, {}, 0, 0, 0)


def counts(past: History, found: Sequence[Incident]) -> Counts:
    """Of each generation the rank with most steps counts, so the sum never falls."""
    steps, tokens = 0, 0.0
    for generation in past.generations:
        if generation.steps:
            rank = max(generation.steps, key=lambda r: (len(generation.steps[r]), -r))
            steps += len(generation.steps[rank])
            logged = generation.steps[rank].metric("tokens")
            tokens += float(logged[logged == logged].sum()) if logged is not None else 0.0
    decided = [i for i in found if i.rung is not None]
    recovered = [i for i in decided if i.recovered]
    return Counts(
        steps,
        tokens,
        dict(sorted(Counter(i.class_ for i in decided).items())),
        sum(i.attempts for i in decided if i.rung != "give_up"),
        sum(i.steps_lost or 0 for i in recovered),
        len(recovered),
    )


def exposition(runs: Iterable[tuple[Status, Counts]]) -> str:
    """The text that a scrape gets; the series of several runs stand below one head."""
    families: dict[str, Metric] = {}
    for status, count in runs:
        for metric in run_metrics(status, count):
            families.setdefault(metric.name, Metric(metric.name, metric.kind, metric.help, [])).samples.extend(
                metric.samples
            )
    lines = []
    for metric in families.values():
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{_labels(labels)} {_number(value)}" for labels, value in metric.samples]
    return "".join(line + "\n" for line in lines)


def run_metrics(status: Status, count: Counts) -> list[Metric]:
    """All families of one run."""
    run = {"run": status.run_id}
    saves, tiers = status.saves, status.saves.tiers
    found: list[Metric] = []

    def add(name: str, kind: str, text: str, *samples: tuple[Labels, float | int | None]) -> None:
        known = [({**run, **labels}, float(value)) for labels, value in samples if value is not None]
        if known:
            found.append(Metric(f"ridethrough_{name}", kind, text, known))

    add("up", "gauge", "1 while some process of the run lives", ({}, status.state not in ("ended", "died")))
    add("step", "gauge", "Newest finished step", ({}, status.step))
    add("steps_total", "counter", "Finished steps, each time they were done", ({}, count.steps))
    add("steps_lost_total", "counter", "Finished steps that a recovery rolled back", ({}, count.steps_lost))
    add("useful_steps", "gauge", "Finished steps that count so far", ({}, status.step))
    add("steps_planned", "gauge", "Steps that the job will do", ({}, status.total))
    add("tokens_total", "counter", "Tokens of all finished steps", ({}, count.tokens))
    add("tokens_per_second", "gauge", "Tokens per second over the last steps", ({}, status.tokens_per_s))
    add("step_seconds", "gauge", "Median time of the last steps", ({}, status.step_s))
    add("loss", "gauge", "Training loss of the newest step", ({}, status.loss))
    add("generation", "gauge", "Number of the generation", ({}, status.generation))
    add("ranks", "gauge", "Rank slots of the job", ({}, status.num_ranks))
    since = min((rank.since_s for rank in status.ranks), default=None)
    add("seconds_since_step", "gauge", "Time since any rank finished a step", ({}, since))
    causes = [({"class": name}, value) for name, value in count.incidents.items()]
    add("incidents_total", "counter", "Incidents by class of fault", *causes)
    add("recoveries_total", "counter", "Incidents after which training went on", ({}, count.recoveries))
    add(
        "restarts_total", "counter", "Times that the job was restarted, failed attempts included", ({}, status.restarts)
    )
    add("restart_budget", "gauge", "Most restarts that the policy allows", ({}, status.max_restarts))
    open_one = status.open_incident
    add("incident_open", "gauge", "1 while the job recovers", ({}, open_one is not None))
    add(
        "rank_recurring",
        "gauge",
        "1 when one rank causes most of the incidents",
        ({}, status.recurring_rank is not None),
    )
    add(
        "stragglers",
        "gauge",
        "Ranks that are outliers in step or waiting time",
        ({}, len({s.rank for s in status.stragglers})),
    )
    add("training_goodput_ratio", "gauge", "Time of steps that count over wall", ({}, status.training_goodput))
    add("infrastructure_goodput_ratio", "gauge", "Time up over wall", ({}, status.infrastructure_goodput))
    add("unattributed_ratio", "gauge", "Time that no event explains over wall", ({}, status.unattributed))
    add("wall_seconds", "gauge", "Since the job's start", ({}, status.wall_s))
    events = (("committed", saves.num_committed), ("superseded", saves.num_superseded), ("failed", saves.num_failed))
    add("saves_total", "counter", "Saves by how they ended", *(({"event": name}, value) for name, value in events))
    add("save_backlog", "gauge", "Saves that wait for storage", ({}, len(saves.backlog)))
    add("save_backlog_bytes", "gauge", "Bytes of the saves that wait for storage", ({}, saves.backlog_bytes))
    add("snapshot_host_bytes", "gauge", "Host memory that snapshots take, all nodes", ({}, saves.host_bytes))
    promise = saves.promise or {}
    add("memory_every_steps", "gauge", "Steps from one snapshot in memory to the next", ({}, promise.get("every")))
    add("memory_snapshot_seconds", "gauge", "Time that a snapshot holds a step up", ({}, promise.get("snapshot_s")))
    add("memory_replica_seconds", "gauge", "Time that a replication takes", ({}, promise.get("replica_s")))
    add("node_loss_steps", "gauge", "Most steps that a lost node costs", ({}, promise.get("node_loss_steps")))
    by_tier = tiers.items()
    add("checkpoint_age_seconds", "gauge", "Age of the newest state", *(({"tier": n}, t.age_s) for n, t in by_tier))
    add("checkpoint_step", "gauge", "Step of the newest state", *(({"tier": n}, t.step) for n, t in by_tier))
    add(
        "rollback_steps", "gauge", "Steps that a rollback loses", *(({"tier": n}, t.rollback_steps) for n, t in by_tier)
    )
    add(
        "checkpoint_write_seconds",
        "gauge",
        "Time of the last write",
        ({}, saves.write_s[-1] if saves.write_s else None),
    )
    last = saves.interval_s[-1] if saves.interval_s else None
    add("checkpoint_interval_seconds", "gauge", "Between the last two states on disk", ({}, last))
    return found


def _labels(labels: Labels) -> str:
    def text(value: str) -> str:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    return "{" + ",".join(f'{name}="{text(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _number(value: Any) -> str:
    if value != value:
        return "NaN"
    return repr(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)
