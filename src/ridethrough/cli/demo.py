"""`ridethrough demo`: the main job with its proof. An undisturbed run, the same run through faults, equal bits."""

from __future__ import annotations

import datetime
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli import proof as po
from ridethrough.cli.command import App
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, check_json_target, write_json
from ridethrough.cli.proof import ReferenceJob, check_reference, reference_settings, why_void
from ridethrough.cli.usage import fail, usage_errors
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.ledger.rundir import RunDirError, runs_root, writable_root
from ridethrough.ledger.summary import RunLedger, ledger_summary

if TYPE_CHECKING:
    from ridethrough.faults.schedule import Schedule

app = App()


@app.command()
def demo(
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each of the two runs.")] = 200,
    ranks: po.Ranks = 4,
    checkpoint_every: po.CheckpointEvery = 25,
    preset: po.Preset = "tiny",
    data: po.Data = None,
    seed: po.Seed = 0,
    fault_count: fo.FaultCount = 5,
    fault_seed: fo.FaultSeed = 42,
    fault_types: fo.FaultTypes = fo.DEFAULT_TYPES,
    fault_type_weights: fo.FaultTypeWeights = None,
    fault_phases: fo.FaultPhases = None,
    fault_at_once: fo.FaultAtOnce = 1,
    fault_at: fo.FaultAt = None,
    fault_schedule: fo.FaultSchedule = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--runs", metavar="DIR", help="Where runs are kept; else RIDETHROUGH_RUNS, else ./runs."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            callback=la.usable_run_id,
            metavar="ID",
            help="Name of the run; it must be a new one.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train a small Llama through real faults and prove that the result is the undisturbed one, bit for bit.

    Two runs with the same seed: one without faults, then one with the seeded schedule (`ridethrough faults plan`
    prints it). Ends with the incidents, the ledger (every state in seconds, sum equal to the wall), both goodputs and
    the verdict. Exit code 0 only if the final parameters and optimizer are equal; 84 if they are not.

    Examples:

        ridethrough demo
        ridethrough demo --steps 100 --ranks 2 --fault-types sigkill --json demo.json
    """
    if fault_type_weights is None and fault_types == fo.DEFAULT_TYPES:
        fault_type_weights = "0.4,0.3,0.3"
    settings = reference_settings(preset, steps, seed, checkpoint_every, data)
    check_reference(settings, ranks)
    schedule = fo.schedule_from_options(
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
    )
    root = runs_root(out)
    with usage_errors(RunDirError):
        writable_root(root)
    if json not in (None, STANDARD_OUTPUT):
        check_json_target(json)
    name = run_id or datetime.datetime.now().strftime("demo-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    for taken in (root / name, root / f"{name}-control"):
        if taken.exists():
            fail(f"{taken} exists: the demo proves a run from its start; give another --run-id or --out")
    show = sys.stderr if json == STANDARD_OUTPUT else sys.stdout
    raise typer.Exit(_two_runs(ReferenceJob(settings, ranks, root, show), schedule, name, json))


def _two_runs(job: ReferenceJob, schedule: Schedule | None, name: str, json: str | None) -> int:
    from ridethrough.report.html import write_report
    from ridethrough.report.terminal import print_run

    show, control = job.out, f"{name}-control"
    code = job.run(control, "undisturbed run")
    if code != 0:
        return _ended(code, "undisturbed run", job, control)
    if schedule is not None:
        print(f"{len(schedule.faults)} faults are coming, schedule hash {schedule.hash}", file=show)
    code = job.run(name, "run with faults", schedule)
    expected = job.final_hash(control)
    ledger = job.read(name)
    if ledger is not None:
        report = write_report(job.root / name, control_hash=expected)
        print_run(Console(file=show, width=None if show.isatty() else 180), ledger)
        print(f"report: {report}", file=show)
    if code != 0 or ledger is None:
        return _ended(code, "run with faults", job, name)
    code = _verdict(ledger, schedule, expected, show)
    if json is not None:
        write_json(ledger_summary(ledger, control_hash=expected), json)
    return code


def _verdict(ledger: RunLedger, schedule: Schedule | None, expected: str | None, show: TextIO) -> int:
    why = why_void(ledger, schedule, expected)
    word = "no" if why else f"yes ({expected})"
    print(f"final parameters and optimizer equal to the undisturbed run, bit for bit: {word}", file=show)
    for reason in why:
        print(f"the proof is void: {reason}", file=show)
    return int(ExitCode.PROOF_FAILED) if why else 0


def _ended(code: int, what: str, job: ReferenceJob, run_id: str) -> int:
    print(f"{what} ended with code {code}; its logs are in {job.logs(run_id)}", file=job.out)
    return code
