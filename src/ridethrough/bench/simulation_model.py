"""What a simulated fleet is: its size, its times, its failures, and the mechanisms that keep it going."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = ("exception", "hang", "sigkill", "node_loss")
"""Classes of failure: the script's own error; a rank that stands still; a process that dies; a node that is gone."""


@dataclass(frozen=True)
class Times:
    """How long each part takes, in seconds. `rebuild_s` is by rung: in_process, replace_process, replace_node; and, for
    mechanisms without rungs, `all`: everything until the training function is called again."""

    step_s: float
    first_step_s: float = 0.0  # what a generation's first step takes more
    launch_s: float = 0.0
    init_s: float = 0.0
    restore_s: float = 0.0  # from memory, or where there is none from storage with all ranks reading at once
    finish_s: float = 0.0
    detect_s: dict[str, float] = field(default_factory=dict)
    teardown_s: float = 0.0
    rebuild_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saving:
    """How states are kept. `mode`: none, sync (training waits `write_s`), wait (asynchronous: waits for the save
    before), supersede (never waits: a newer save replaces a queued one). `memory_every` > 0: a copy of every so many
    steps in the memory of other processes, and of another node `replica_lag` steps later."""

    mode: str = "supersede"
    interval: int = 500
    write_s: float = 0.0
    stage_s: float = 0.0  # training is blocked so long by each save
    memory_every: int = 0
    replica_lag: int = 1


@dataclass(frozen=True)
class Mechanism:
    """`rungs`: the generation machine decides what is replaced. Else everything is started anew at any failure, after
    the kubelet's waits if `pods`."""

    name: str
    times: Times
    saving: Saving
    rungs: bool = False
    pods: bool = False


@dataclass(frozen=True)
class Fleet:
    """`rates`: failures per GPU and hour, by class. `repair_s`: until a lost node's replacement joins if no spare is
    free. `group`: ranks that one slot of the simulated plan stands for (a node's, in large fleets: they share every
    plan). `total_steps` or `horizon_s` ends the run, whichever comes first."""

    num_gpus: int
    gpus_per_node: int = 8
    rates: dict[str, float] = field(default_factory=dict)
    num_spares: int = 0
    repair_s: float = 4 * 3600.0
    total_steps: int = 10**9
    horizon_s: float = math.inf
    group: int = 1

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_gpus / self.gpus_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole fleet."""
        total = sum(self.rates.values()) * self.num_gpus
        return 3600.0 / total if total else math.inf


@dataclass(frozen=True)
class Planned:
    """A failure at a fixed place: it strikes in `step`, `into_s` seconds after that step began."""

    step: int
    kind: str
    rank: int = 0
    into_s: float = 0.0


def with_interval(mechanism: Mechanism, interval: int) -> Mechanism:
    return replace(mechanism, saving=replace(mechanism.saving, interval=interval))


def with_times(content: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The case with measured times in place of its own; what was not measured stays, also of the times by class and
    by rung."""
    mechanism = content.get("mechanism")
    if not isinstance(mechanism, dict) or not isinstance(mechanism.get("times"), dict):
        return content
    times = dict(mechanism["times"])
    for name, value in measured.items():
        times[name] = {**times.get(name, {}), **value} if isinstance(value, dict) else value
    return {**content, "mechanism": {**mechanism, "times": times}}


def from_json(content: dict[str, Any]) -> tuple[Fleet, Mechanism]:
    """A case from a file: `{"fleet": {...}, "mechanism": {"name", "times": {...}, "saving": {...}}}`. Raises
    ValueError with one line."""
    try:
        about = dict(content["mechanism"])
        times, saving = Times(**about.pop("times")), Saving(**about.pop("saving"))
        fleet, mechanism = Fleet(**content["fleet"]), Mechanism(**about, times=times, saving=saving)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a case has fleet and mechanism with times and saving: {error}") from error
    unknown = set(fleet.rates) - set(KINDS)
    if unknown:
        raise ValueError(f"rates of {', '.join(sorted(unknown))}: the classes are {', '.join(KINDS)}")
    if fleet.total_steps == 10**9 and math.isinf(fleet.horizon_s):
        raise ValueError("give the fleet total_steps or horizon_s, else the run has no end")
    return fleet, mechanism
