"""`ridethrough faults`: schedules and kinds of fault."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.fault_options import (
    DEFAULT_TYPES,
    FaultAt,
    FaultAtOnce,
    FaultCount,
    FaultPhases,
    FaultSchedule,
    FaultSeed,
    FaultTypes,
    FaultTypeWeights,
    schedule_from_options,
)
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.table import print_table
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.schedule import Schedule

app = App(
    no_args_is_help=True,
    help="Faults on purpose: which kinds there are, and which of them hits which rank at which step.",
)


@app.command("plan")
def plan_command(
    fault_count: FaultCount = 5,
    fault_seed: FaultSeed = 42,
    fault_types: FaultTypes = DEFAULT_TYPES,
    fault_type_weights: FaultTypeWeights = None,
    fault_phases: FaultPhases = None,
    fault_at_once: FaultAtOnce = 1,
    fault_at: FaultAt = None,
    fault_schedule: FaultSchedule = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the job.", min=1)] = 200,
    ranks: Annotated[int, typer.Option("--ranks", "--world-size", help="World size of the job.", min=1)] = 4,
    json: JsonOption = None,
) -> None:
    """Print the schedule that a job with the same options would suffer; starts nothing.

    The schedule is a function of the options alone, the same on every machine. It has a hash: results under different
    hashes must not be compared. Each fault fires exactly once per job, over all restarts. Step 1 is never hit, since
    a job that fails before its first step is taken for a broken script.

    Examples:

        ridethrough faults plan --fault-types hang,exit --fault-type-weights 0.6,0.4
        ridethrough faults plan --fault-at exception:0:7 --fault-at hang:3:12:backward
        ridethrough faults plan --steps 2000 --ranks 16 --json schedule.json
    """
    schedule = schedule_from_options(
        count=fault_count,
        seed=fault_seed,
        types=fault_types,
        weights=fault_type_weights,
        steps=steps,
        world_size=ranks,
        phases=fault_phases,
        at_once=fault_at_once,
        at=fault_at,
        file=fault_schedule,
    ) or Schedule(fault_seed, ())
    if json is not None:
        write_json(schedule.as_json(), json)
        return
    rows = []
    for fault in schedule.faults:
        args = json_format.dumps(dict(fault.args)) if fault.args else ""
        rows.append([fault.id, str(fault.step), str(fault.rank), fault.phase, fault.kind, args])
    print_table(["id", "step", "rank", "phase", "kind", "args"], rows)
    seed = "by hand" if schedule.seed is None else f"seed {schedule.seed}"
    sys.stdout.write(f"{len(rows)} faults, {seed}, schedule hash {schedule.hash}\n")


@app.command()
def kinds(json: JsonOption = None) -> None:
    """List the kinds of fault: what each does and needs, and the class and rung that its incident should have.

    - means that nothing should be restarted. A job whose schedule has a kind without what that needs refuses to begin.
    --json also says how each fires, what ends it and what detects it.

    Example:

        ridethrough faults kinds
    """
    rows = [
        {
            "kind": kind.name,
            "does": kind.does,
            "fires": kind.fires,
            "freed_by": kind.freed_by,
            "class": kind.ledger_class,
            "seen_by": kind.seen_by,
            "rung": kind.rung,
            "needs": kind.needs,
            "ends_generation": kind.ends_generation,
        }
        for kind in KINDS.values()
    ]
    if json is not None:
        write_json(rows, json)
        return
    shown = [[kind.name, kind.ledger_class or "-", kind.rung or "-", kind.does, kind.needs] for kind in KINDS.values()]
    print_table(["kind", "class", "rung", "does", "needs"], shown)
