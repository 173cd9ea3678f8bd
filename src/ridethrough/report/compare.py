"""Two runs side by side: what differs in their settings, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridethrough.ledger.rundir import differences
from ridethrough.ledger.summary import RunLedger, ledger_summary

FIGURES = (
    "steps",
    "final_loss",
    "val_loss",
    "training_goodput",
    "infrastructure_goodput",
    "wall_s",
    "slots",
    "num_incidents",
    "num_recovered",
    "recovery_p50_s",
    "recovery_max_s",
    "steps_lost",
)


class IncomparableError(ValueError):
    """The two runs suffered different fault schedules; the message is one line with the remedy."""


@dataclass(frozen=True)
class Comparison:
    """`config`, `versions`: key -> (a, b) of what differs. `figures`: name -> (a, b). `same_result`: equal final
    hashes; None if one of them has none."""

    a: str
    b: str
    schedule_hashes: tuple[str | None, str | None]
    config: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    figures: dict[str, tuple[Any, Any]]
    states_s: dict[str, tuple[float, float]]
    same_result: bool | None

    def as_json(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "schedule_hashes": list(self.schedule_hashes),
            "config": {key: list(pair) for key, pair in self.config.items()},
            "versions": {key: list(pair) for key, pair in self.versions.items()},
            "figures": {key: list(pair) for key, pair in self.figures.items()},
            "states_s": {key: list(pair) for key, pair in self.states_s.items()},
            "same_result": self.same_result,
        }


def compare(a: RunLedger, b: RunLedger, *, any_schedule: bool = False) -> Comparison:
    """Raises IncomparableError if their fault schedules differ, unless `any_schedule`."""
    hashes = (a.run["schedule_hash"], b.run["schedule_hash"])
    if hashes[0] != hashes[1] and not any_schedule:
        raise IncomparableError(
            f"{a.run['run_id']} ran under fault schedule {hashes[0] or 'none'}, {b.run['run_id']} under "
            f"{hashes[1] or 'none'}: their goodputs say nothing about each other; --any-schedule compares them anyway"
        )
    left, right = figures(a), figures(b)
    final = (left.pop("final_hash"), right.pop("final_hash"))
    states = [(a.part.states_ns[s] / 1e9, b.part.states_ns[s] / 1e9) for s in a.part.states_ns]
    return Comparison(
        a.run["run_id"],
        b.run["run_id"],
        hashes,
        differences(a.run["config"], b.run["config"]),
        differences(a.run["versions"], b.run["versions"]),
        {name: (left[name], right[name]) for name in FIGURES},
        dict(zip(a.part.states_ns, states, strict=True)),
        None if None in final else final[0] == final[1],
    )


def figures(ledger: RunLedger) -> dict[str, Any]:
    """The figures of one run by the names of `FIGURES`, and `final_hash`."""
    data = ledger_summary(ledger)
    whole = data["classes"].get("all", {})
    return {
        **{name: data[name] for name in ("steps", "final_loss", "val_loss", "final_hash")},
        "training_goodput": data["training_goodput"],
        "infrastructure_goodput": data["infrastructure_goodput"],
        "wall_s": ledger.part.wall_ns / 1e9,
        "slots": ledger.part.slots,
        "num_incidents": len(ledger.incidents),
        "num_recovered": sum(i.recovered for i in ledger.incidents),
        "recovery_p50_s": whole.get("p50_s"),
        "recovery_max_s": whole.get("max_s"),
        "steps_lost": sum(i.steps_lost or 0 for i in ledger.incidents),
    }
