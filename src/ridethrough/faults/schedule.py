"""Which fault hits which rank at which step: a pure function of its arguments, with a hash.

    plan(seed=42, count=5, types=("exception", "hang"), weights=(0.6, 0.4), steps=2000, world_size=16)

Same arguments, same schedule, on every machine and in every mechanism under comparison. Results whose schedule
hashes differ must not be compared. No torch here: the command line prints plans in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.faults.draw import Draw
from ridethrough.faults.kinds import KINDS, Kind
from ridethrough.faults.phases import DEFAULT_PHASES, PHASES, RECOVERY_PHASES

FIRST_STEP = 2
"""Plans leave step 1 alone: a job that fails before its first step is taken for a broken script and not restarted."""


class ScheduleError(ValueError):
    """The schedule cannot be made or read; the message is one line and says what to do."""


@dataclass(frozen=True)
class Fault:
    """One planned fault: `kind` hits `rank` when it enters `phase` of the 1-based `step`."""

    id: str
    step: int
    rank: int
    phase: str
    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields in the order of the published JSON."""
        return {
            "id": self.id,
            "step": self.step,
            "rank": self.rank,
            "phase": self.phase,
            "kind": self.kind,
            "args": dict(self.args),
        }


@dataclass(frozen=True)
class Schedule:
    """The faults of one job in step order. `seed` is None for one written by hand."""

    seed: int | None
    faults: tuple[Fault, ...]

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON of seed and faults."""
        content = {"seed": self.seed, "faults": [fault.as_json() for fault in self.faults]}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """`{"hash", "seed", "faults": [...]}`: what `faults plan --json` prints and `save` writes."""
        return {"hash": self.hash, "seed": self.seed, "faults": [fault.as_json() for fault in self.faults]}

    def save(self, path: Path) -> None:
        """Write as JSON, 0600, by rename: a reader sees the whole schedule or none."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.as_json(), indent=1) + "\n")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read what `save` wrote. Raises ScheduleError if it is no schedule or was edited without a new hash."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            faults = tuple(Fault(**{**fault, "args": dict(fault["args"])}) for fault in content["faults"])
            schedule = cls(content["seed"], faults)
            stated = content["hash"]
        except OSError as error:
            raise ScheduleError(
                f"{path}: cannot be read ({error.strerror}); give a file written by `faults plan --json`"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ScheduleError(
                f"{path}: not a fault schedule ({error}); write one with `faults plan --json`"
            ) from error
        check(schedule.faults)
        if stated != schedule.hash:
            raise ScheduleError(
                f"{path}: its hash says {stated}, its faults hash to {schedule.hash}; "
                "it was edited: plan it anew with --fault-at"
            )
        return schedule


def plan(
    seed: int,
    count: int,
    types: Sequence[str],
    weights: Sequence[float] | None,
    steps: int,
    world_size: int,
    phases: Sequence[str] | None = None,
    *,
    at_once: int = 1,
) -> Schedule:
    """Draw exactly `count` faults over steps 2..`steps` and all ranks (0 and the last included).

    `types` are names of `KINDS`, drawn by `weights` (None: all alike; any positive scale). `phases` default to
    `DEFAULT_PHASES`. No two faults share a step unless `at_once` > 1: then groups of that many hit different ranks
    in one phase of one step. A fault aimed at a recovery phase is kept only below a step at which another fault ends
    a generation, so that the recovery it waits for does come; else its phase is drawn again among the others.

    Raises ScheduleError with a one-line remedy.
    """
    weights = _checked_weights(types, weights)
    phases = _checked_phases(phases)
    _check_room(count, steps, world_size, at_once)
    draw = Draw(seed)
    num_groups = math.ceil(count / at_once)
    group_steps = sorted(draw.distinct(FIRST_STEP, steps, num_groups, "step")) if count else []
    faults = []
    for index in range(count):
        group = index // at_once
        kind = draw.weighted(types, weights, f"kind/{index}")
        ranks = draw.distinct(0, world_size - 1, at_once, f"rank/{group}")
        faults.append(
            Fault(
                id=f"f{index + 1:02d}",
                step=group_steps[group],
                rank=ranks[index % at_once],
                phase=draw.choice(phases, f"phase/{group}"),
                kind=kind,
                args=KINDS[kind].draw_args(draw, f"args/{index}"),
            )
        )
    return Schedule(seed, tuple(_anchored(faults, phases, draw)))


def by_hand(entries: Sequence[str], steps: int, world_size: int) -> Schedule:
    """A schedule from entries `KIND:RANK:STEP` or `KIND:RANK:STEP:PHASE` (phase: `forward`); RANK -1 is the last.

    Raises ScheduleError naming the entry.
    """
    faults = []
    for index, entry in enumerate(entries):
        parts = entry.split(":")
        try:
            kind, rank, step = parts[0], int(parts[1]), int(parts[2])
            phase = parts[3] if len(parts) == 4 else "forward"
            if len(parts) > 4:
                raise ValueError
        except (IndexError, ValueError):
            raise ScheduleError(f"fault {entry!r}: write KIND:RANK:STEP[:PHASE], like exception:1:7:backward") from None
        spec = _kind(kind)
        rank = world_size + rank if rank < 0 else rank
        if not 0 <= rank < world_size or not 1 <= step <= steps:
            raise ScheduleError(
                f"fault {entry!r}: rank must be in 0..{world_size - 1} and step in 1..{steps}: "
                "correct it or enlarge the job"
            )
        args = spec.draw_args(Draw(0), f"args/{entry}")
        faults.append(Fault(f"f{index + 1:02d}", step, rank, phase, kind, args))
    check(faults)
    return Schedule(None, tuple(sorted(faults, key=lambda fault: fault.step)))


def check(faults: Sequence[Fault]) -> None:
    """Raise ScheduleError unless ids are unique file names, and kinds, phases, steps and ranks make sense."""
    seen = set()
    for fault in faults:
        _kind(fault.kind)
        _checked_phases([fault.phase])
        plain = fault.id.replace("-", "").replace("_", "").isalnum()
        if fault.id in seen or not plain or fault.step < 1 or fault.rank < 0:
            raise ScheduleError(
                f"fault {fault.id!r}: ids must be unique words, steps >= 1 and ranks >= 0: correct the schedule"
            )
        seen.add(fault.id)


def _anchored(faults: list[Fault], phases: Sequence[str], draw: Draw) -> list[Fault]:
    """Keep a recovery-phase fault only if a later (or as late) fault outside recovery ends a generation."""
    others = [phase for phase in phases if phase not in RECOVERY_PHASES]
    if faults and not others:
        raise ScheduleError(
            f"phases {', '.join(phases)} come only with a recovery: add one that any step has, like forward"
        )
    out = []
    anchored = False
    for fault in reversed(faults):
        if fault.phase in RECOVERY_PHASES and not anchored:
            phase = draw.choice(others, f"phase-again/{fault.id}")
            fault = Fault(fault.id, fault.step, fault.rank, phase, fault.kind, fault.args)
        if fault.phase not in RECOVERY_PHASES:
            anchored = anchored or KINDS[fault.kind].ends_generation
        out.append(fault)
    return out[::-1]


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise ScheduleError(f"unknown fault kind {name!r}: choose among {', '.join(sorted(KINDS))}")
    return KINDS[name]


def _checked_weights(types: Sequence[str], weights: Sequence[float] | None) -> list[float]:
    if not types:
        raise ScheduleError(f"no fault types: choose among {', '.join(sorted(KINDS))}")
    for name in types:
        _kind(name)
    if len(set(types)) != len(types):
        raise ScheduleError(f"fault types {', '.join(types)}: one is named twice: name each once")
    if weights is None:
        return [1.0] * len(types)
    if len(weights) != len(types):
        raise ScheduleError(
            f"{len(weights)} weights for {len(types)} fault types ({', '.join(types)}): "
            "give one weight per type, in the same order"
        )
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights) > 0:
        shown = ", ".join(str(weight) for weight in weights)
        raise ScheduleError(f"fault weights {shown}: give numbers >= 0 of which one is above 0")
    return [float(weight) for weight in weights]


def _checked_phases(phases: Sequence[str] | None) -> Sequence[str]:
    if phases is None:
        return DEFAULT_PHASES
    for phase in phases:
        if phase not in PHASES:
            raise ScheduleError(f"unknown phase {phase!r}: choose among {', '.join(PHASES)}")
    if not phases:
        raise ScheduleError(f"no fault phases: choose among {', '.join(PHASES)}")
    return phases


def _check_room(count: int, steps: int, world_size: int, at_once: int) -> None:
    if count < 0 or world_size < 1 or steps < 1:
        raise ScheduleError(
            f"{count} faults, {steps} steps, {world_size} ranks: give a count >= 0 and at least one step and rank"
        )
    if not 1 <= at_once <= world_size:
        raise ScheduleError(f"{at_once} faults at once on {world_size} ranks: give 1 to {world_size}")
    room = max(0, steps - FIRST_STEP + 1)
    if math.ceil(count / at_once) > room:
        raise ScheduleError(
            f"{count} faults do not fit into {steps} steps (each needs a step of its own, from step {FIRST_STEP} on): "
            f"ask for at most {room * at_once} faults or for more steps"
        )
