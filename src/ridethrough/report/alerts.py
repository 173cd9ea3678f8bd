"""Alerts of one run, each told once: an incident, that it recovered or that it recurs, and what goes wrong slowly.

    watch = Watch()
    for alert in watch.look(status_of(...), ledger.incidents): send(alert.as_json())

Pure: no clock and no network. `recovered` and `recurring` are different messages: a fault that keeps coming back is
not mended by another restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridethrough.ledger.incidents import Incident, place
from ridethrough.report.status import Status
from ridethrough.report.terminal import last_line

RECURS = 3  # times
_STALE = 3.0  # intervals between saves
_BUDGET = 0.8


@dataclass(frozen=True)
class Alert:
    """`kind`: incident, recovered, recurring, checkpoint_stale, write_too_long, no_progress, budget, ended, died.
    `text` is one line; `fields` what a program needs."""

    kind: str
    severity: str
    run_id: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}


class Watch:
    """Remembers what was told. Give it each newer view of the same run."""

    def __init__(self) -> None:
        self._told: set[tuple[str, Any]] = set()
        self._lasting: set[str] = set()

    def look(self, status: Status, found: Sequence[Incident]) -> list[Alert]:
        """What is new since the last look."""
        alerts: list[Alert] = []
        for i in found:
            key = (i.job, i.generation)
            where = f"{i.class_} of rank {i.rank} in {place(i.phase, i.step)}"
            where += f" (injected: {' '.join(i.injected)})" if i.injected else ""
            fields: dict[str, Any] = {"id": i.id, "class": i.class_, "rank": i.rank, "host": i.host, "rung": i.rung}
            fields |= {"step": i.step, "injected": i.injected}
            if self._once("incident", key):
                text = f"{where}: {last_line(i.root_cause)}"
                alerts.append(Alert("incident", "warning", status.run_id, text, fields))
            if i.recovered and self._once("recovered", key):
                text = f"recovered from {where} in {i.first_step_s:.2f} s, {i.steps_lost} steps lost"
                more = {"first_step_s": i.first_step_s, "steps_lost": i.steps_lost, "resumed_at": i.resumed_at}
                alerts.append(Alert("recovered", "info", status.run_id, text, {**fields, **more}))
        alerts += self._recurring(status, found)
        alerts += self._slowly(status)
        if status.state in ("ended", "died") and self._once("end", None):
            good = status.state == "ended" and status.code == 0
            text = (
                f"ended with code {status.code}: {status.reason}"
                if status.state == "ended"
                else "died without a result"
            )
            alerts.append(
                Alert(status.state, "info" if good else "critical", status.run_id, text, {"code": status.code})
            )
        return alerts

    def _recurring(self, status: Status, found: Sequence[Incident]) -> list[Alert]:
        alerts = []
        by_rank = Counter(i.rank for i in found if i.rank is not None)
        by_place = Counter((i.class_, i.step) for i in found if i.step is not None)
        for what, counts, unit in (("rank", by_rank, "rank {}"), ("place", by_place, "{0[0]} at step {0[1]}")):
            for key, count in counts.items():
                most = 1 << (count // RECURS).bit_length() if count >= RECURS else 0  # told at 3, 6, 12, 24 ...
                if most and self._once(f"recurring {what}", (key, most)):
                    text = f"recurring: {unit.format(key)}, {count} incidents; another restart will not mend it"
                    alerts.append(Alert("recurring", "critical", status.run_id, text, {what: key, "count": count}))
        return alerts

    def _slowly(self, status: Status) -> list[Alert]:
        alerts: list[Alert] = []
        saves, disk = status.saves, status.saves.tiers.get("disk")
        live = status.state in ("running", "recovering")
        interval_s = saves.interval_s[-1] if saves.interval_s else None
        since_s = min((rank.since_s for rank in status.ranks), default=0.0)
        limit_s = max(60.0, 20 * (status.step_s or 0.0))
        stale = live and disk is not None and interval_s is not None and disk.age_s > _STALE * interval_s
        long = live and interval_s is not None and bool(saves.write_s) and saves.write_s[-1] > 0.8 * interval_s
        budget = status.max_restarts is not None and status.restarts > _BUDGET * status.max_restarts > 0
        age = f"the newest state on disk is {disk.age_s:.0f} s old" if disk is not None else ""
        for kind, on, severity, text in (
            ("checkpoint_stale", stale, "warning", age),
            ("write_too_long", long, "warning", "saves take more than 0.8 of their interval to write"),
            ("no_progress", live and since_s > limit_s, "critical", f"no step was finished for {since_s:.0f} s"),
            ("budget", budget, "warning", f"{status.restarts} of {status.max_restarts} restarts are used"),
        ):
            if on and kind not in self._lasting:
                alerts.append(Alert(kind, severity, status.run_id, text))
            (self._lasting.add if on else self._lasting.discard)(kind)
        return alerts

    def _once(self, kind: str, key: Any) -> bool:
        new = (kind, key) not in self._told
        self._told.add((kind, key))
        return new
