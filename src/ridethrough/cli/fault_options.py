"""The `--fault-*` options, spelled alike in every command that trains (with `-` or `_`), and what they mean.

def demo(fault_count: FaultCount = 5, fault_seed: FaultSeed = 42, ...) -> None:
    schedule = schedule_from_options(count=fault_count, seed=fault_seed, ..., steps=steps, world_size=ranks)
    if schedule is not None:
        schedule.save(run_dir / "faults.json")
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli.usage import fail, usage_errors
from ridethrough.faults.schedule import Schedule, ScheduleError, by_hand, plan

DEFAULT_TYPES = "exception,hang,sigkill"
_PANEL = "Faults on purpose"

FaultCount = Annotated[
    int,
    typer.Option("--fault-count", help="How many faults to draw.", rich_help_panel=_PANEL),
]
FaultSeed = Annotated[
    int,
    typer.Option("--fault-seed", help="Same seed and options, same schedule.", rich_help_panel=_PANEL),
]
FaultTypes = Annotated[
    str,
    typer.Option(
        "--fault-types",
        metavar="KIND,...",
        help="Kinds to draw from; `ridethrough faults kinds` lists them.",
        rich_help_panel=_PANEL,
    ),
]
FaultTypeWeights = Annotated[
    str | None,
    typer.Option(
        "--fault-type-weights",
        metavar="NUMBER,...",
        help="One weight per kind, in the same order, like 0.6,0.4; without it all are alike.",
        rich_help_panel=_PANEL,
    ),
]
FaultPhases = Annotated[
    str | None,
    typer.Option(
        "--fault-phases",
        metavar="PHASE,...",
        help="Phases to draw from: step, data, forward, backward, optimizer, save, eval, recovery, init, load, "
        "first_step; without it forward, backward and optimizer.",
        rich_help_panel=_PANEL,
    ),
]
FaultAtOnce = Annotated[
    int,
    typer.Option(
        "--fault-at-once",
        help="Faults that share a step and phase, on different ranks.",
        rich_help_panel=_PANEL,
    ),
]
FaultAt = Annotated[
    list[str] | None,
    typer.Option(
        "--fault-at",
        metavar="KIND:RANK:STEP[:PHASE]",
        help="A fault chosen by hand, instead of drawn ones; may be repeated. Rank -1 is the last.",
        rich_help_panel=_PANEL,
    ),
]
FaultSchedule = Annotated[
    Path | None,
    typer.Option(
        "--fault-schedule",
        metavar="FILE",
        help="Play back a schedule written by `ridethrough faults plan --json FILE`.",
        rich_help_panel=_PANEL,
    ),
]


def schedule_from_options(
    *,
    count: int,
    seed: int,
    types: str,
    weights: str | None,
    steps: int,
    world_size: int,
    phases: str | None = None,
    at_once: int = 1,
    at: list[str] | None = None,
    file: Path | None = None,
) -> Schedule | None:
    """The schedule that the options ask for, None if they ask for none. `file` goes before `at`, `at` before drawing.

    Exits with code 2 and one line if they make no sense together.
    """
    with usage_errors(ScheduleError):
        if file is not None:
            if at:
                fail("--fault-schedule and --fault-at: give one of them")
            return _fitting(Schedule.load(file), file, steps, world_size)
        if at:
            return by_hand(at, steps, world_size)
        drawn = plan(
            seed,
            count,
            _words(types),
            None if weights is None else [_number(word) for word in _words(weights)],
            steps,
            world_size,
            None if phases is None else _words(phases),
            at_once=at_once,
        )
        return drawn if count else None  # options that make no sense are told even if nothing is drawn


def _fitting(schedule: Schedule, file: Path, steps: int, world_size: int) -> Schedule:
    for fault in schedule.faults:
        if fault.step > steps or fault.rank >= world_size:
            raise ScheduleError(
                f"{file}: fault {fault.id} hits rank {fault.rank} at step {fault.step}, this job has "
                f"{world_size} ranks and {steps} steps: give the schedule of this job or plan a new one"
            )
    return schedule


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ScheduleError(f"fault weight {word!r}: give numbers, like --fault-type-weights 0.6,0.4") from None
