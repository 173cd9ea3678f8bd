"""`ridethrough chaos`: campaigns. The reference job through one seeded schedule of faults after another."""

from __future__ import annotations

import datetime
import secrets
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli import fault_options as fo
from ridethrough.cli import proof as po
from ridethrough.cli.command import App
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, check_json_target, write_json
from ridethrough.cli.policy_file import PolicyFile, read_policy
from ridethrough.cli.proof import ReferenceJob, check_reference, reference_settings, why_void
from ridethrough.cli.table import print_table
from ridethrough.cli.usage import usage_errors
from ridethrough.faults.schedule import Schedule
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.ledger.incidents import Incident, by_class
from ridethrough.ledger.rundir import RunDirError, runs_root, writable_root
from ridethrough.ledger.summary import ledger_summary

_TYPES = "exception,exit,hang,sigkill,sigsegv"
_STOPPED = (130, 143, int(ExitCode.PREEMPTED))  # Ctrl-C or SIGTERM, which the run was told too

app = App(no_args_is_help=True)


@app.callback()
def root() -> None:
    """Campaigns: many jobs, each through other faults, each proved against the undisturbed one."""


@app.command("run")
def run(
    ctx: typer.Context,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Jobs, each with a schedule of its own.")] = 10,
    limit: Annotated[
        float | None, typer.Option("--for", min=1, metavar="SECONDS", help="Begin no round after so long.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each job.")] = 60,
    ranks: po.Ranks = 4,
    checkpoint_every: po.CheckpointEvery = 10,
    preset: po.Preset = "tiny",
    data: po.Data = None,
    seed: po.Seed = 0,
    fault_count: fo.FaultCount = 3,
    fault_seed: fo.FaultSeed = 42,
    fault_types: fo.FaultTypes = _TYPES,
    fault_type_weights: fo.FaultTypeWeights = None,
    fault_phases: fo.FaultPhases = None,
    fault_at_once: fo.FaultAtOnce = 1,
    policy_file: PolicyFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--runs", metavar="DIR", help="Where runs are kept; else RIDETHROUGH_RUNS, else ./runs."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs of the rounds that passed, too.")] = False,
    json: JsonOption = None,
) -> None:
    """Train the reference job once undisturbed, then in rounds through other faults; each must end with the same bits.

    Round n draws its schedule with --fault-seed + n - 1, so that a round that fails can be repeated alone: its line
    has the command. A hang in data, save or eval is waited for as long as that phase may take: minutes, unless
    --policy says less. Ends with the recovery rate and times of each class of fault. Exit code 0 if all rounds passed;
    84 if one did not, whose run is kept.

    Examples:

        ridethrough chaos run --rounds 20 --json campaign.json
        ridethrough chaos run --for 3600 --rounds 1000 --fault-count 6 --fault-at-once 2
    """
    begun_s = time.monotonic()
    read_policy(ctx, policy_file)
    settings = reference_settings(preset, steps, seed, checkpoint_every, data)
    check_reference(settings, ranks)
    schedules = [
        fo.schedule_from_options(
            count=fault_count,
            seed=fault_seed + number,
            types=fault_types,
            weights=fault_type_weights,
            steps=steps,
            world_size=ranks,
            phases=fault_phases,
            at_once=fault_at_once,
        )
        for number in range(rounds)
    ]
    where = runs_root(out)
    with usage_errors(RunDirError):
        writable_root(where)
    if json not in (None, STANDARD_OUTPUT):
        check_json_target(json)
    show = sys.stderr if json == STANDARD_OUTPUT else sys.stdout
    options = () if policy_file is None else ("--policy", str(policy_file))
    job = ReferenceJob(settings, ranks, where, show, options)
    name = datetime.datetime.now().strftime("chaos-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    code = job.run(f"{name}-control", "undisturbed run")
    if code != 0:
        print(
            f"undisturbed run ended with code {code}; its logs are in {where / f'{name}-control' / 'logs'}", file=show
        )
        raise typer.Exit(code)
    expected = job.final_hash(f"{name}-control")
    found: list[dict[str, Any]] = []
    incidents: list[Incident] = []
    stopped = 0
    for number, schedule in enumerate(schedules, 1):
        if limit is not None and time.monotonic() - begun_s > limit:
            break
        row, seen = _round(job, f"{name}-{number:04d}", f"round {number} of {rounds}", schedule, expected)
        if row["code"] in _STOPPED:
            stopped = row["code"]
            shutil.rmtree(where / row["run_id"], ignore_errors=True)
            break
        found.append(row)
        incidents += seen
        if not row["passed"]:
            print(f"round {number} FAILED: {'; '.join(row['why'])}; {where / row['run_id']} is kept. Again:", file=show)
            print(f"    {_again(job, row['run_id'])}", file=show)
        elif not keep:
            shutil.rmtree(where / row["run_id"])
    if all(row["passed"] for row in found) and not keep:
        shutil.rmtree(where / f"{name}-control")
    result = {
        "control_hash": expected,
        "rounds": found,
        "passed": sum(row["passed"] for row in found),
        "failed": sum(not row["passed"] for row in found),
        "classes": by_class(incidents),
        "cut_off": bool(stopped),
    }
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        _show(result)
    raise typer.Exit(int(ExitCode.PROOF_FAILED) if result["failed"] else stopped)


def _round(
    job: ReferenceJob, run_id: str, title: str, schedule: Schedule | None, expected: str | None
) -> tuple[dict[str, Any], list[Incident]]:
    code = job.run(run_id, title, schedule)
    ledger = job.read(run_id)
    row: dict[str, Any] = {
        "run_id": run_id,
        "fault_seed": schedule.seed if schedule is not None else None,
        "schedule_hash": schedule.hash if schedule is not None else None,
        "code": code,
    }
    if ledger is None:
        return {**row, "passed": False, "why": [f"it ended with code {code} before it began"]}, []
    why = [f"it ended with code {code}"] if code != 0 else why_void(ledger, schedule, expected)
    summary = ledger_summary(ledger, control_hash=expected)
    kept = ("bitwise_equal", "steps", "training_goodput", "infrastructure_goodput", "incidents")
    return {**row, "passed": not why, "why": why, **{key: summary[key] for key in kept}}, ledger.incidents


def _again(job: ReferenceJob, run_id: str) -> str:
    words = [word for key, value in job.settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += [*job.options, "--fault-schedule", str(job.root / run_id / "faults.json")]
    return shlex.join(["ridethrough", "train", "--nproc-per-node", str(job.num_ranks), *words])


def _show(result: dict[str, Any]) -> None:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    names = ("p50_s", "p95_s", "p99_s", "max_s")
    rows = [
        [name, str(row["count"]), f"{row['recovery_rate']:.1%}", *(seconds(row[key]) for key in names)]
        for name, row in result["classes"].items()
    ]
    print_table(["class", "incidents", "recovered", "first step p50 s", "p95", "p99", "max"], rows)
    print(f"{result['passed']} rounds passed, {result['failed']} failed")
