"""`ridethrough demo`: the main job with its proof. An undisturbed run, the same run through faults, equal bits."""

from __future__ import annotations

import datetime
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ridethrough.cli import fault_options as fo
from ridethrough.cli import launching as la
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonCommand, JsonOption, check_json_target, write_json
from ridethrough.cli.usage import fail, usage_errors
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.ledger.rundir import RunDirError, check_run_id, runs_root, writable_root

app = typer.Typer(rich_markup_mode="markdown")


@app.command(cls=JsonCommand)
def demo(
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each of the two runs.")] = 200,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes, on this machine's CPUs or GPUs.")] = 4,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", min=1, help="Steps between saves.")] = 25,
    preset: Annotated[str, typer.Option("--preset", help="Model: tiny, small, 1b, llama3.1-8b.")] = "tiny",
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Text to train on; else Python's own sources.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights, order of samples and dropout.")] = 0,
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
        str | None, typer.Option("--run-id", "--run_id", metavar="ID", help="Name of the run; it must be a new one.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train a small Llama through real faults and prove that the result is the undisturbed one, bit for bit.

    Two runs with the same seed: one without faults, then one with the seeded schedule (`ridethrough faults plan`
    prints it). Ends with the incidents, the ledger (every state in seconds, sum equal to the wall), both goodputs and
    the verdict. Exit code 0 only if the final parameters and optimizer are equal; 84 if they are not.
    """
    if fault_type_weights is None and fault_types == fo.DEFAULT_TYPES:
        fault_type_weights = "0.4,0.3,0.3"
    job: dict[str, Any] = {
        "preset": preset,
        "steps": steps,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "dropout": 0.1,  # so that every rank's random stream matters to the result
        "eval_every": max(1, steps // 4),
    }
    if data is not None:
        job["data"] = data
    schedule = _checked(
        job,
        ranks,
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
        if run_id is not None:
            check_run_id(run_id)
        writable_root(root)
    if json not in (None, STANDARD_OUTPUT):
        check_json_target(json)
    name = run_id or datetime.datetime.now().strftime("demo-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    for taken in (root / name, root / f"{name}-control"):
        if taken.exists():
            fail(f"{taken} exists: the demo proves a run from its start; give another --run-id or --out")
    raise typer.Exit(_two_runs(job, ranks, schedule, root, name, steps, json))


def _checked(job: dict[str, Any], ranks: int, **options: Any) -> Any:
    """The schedule; exits with 2 if job, machine or schedule cannot be."""
    from ridethrough.train.config import ConfigError, check, parse

    with usage_errors(ValueError, ConfigError):
        la.check_machine(ranks)
        check(parse(job), ranks)
    return fo.schedule_from_options(**options)


def _two_runs(
    job: dict[str, Any], ranks: int, schedule: Any, root: Path, name: str, steps: int, json: str | None
) -> int:
    from ridethrough.cli.live import follow
    from ridethrough.ledger.rundir import private_folder
    from ridethrough.ledger.summary import ledger_summary, read_run
    from ridethrough.report.html import write_report
    from ridethrough.report.terminal import print_run

    show = sys.stderr if json == STANDARD_OUTPUT else sys.stdout
    argv = ["train", "--nproc-per-node", str(ranks), "--runs", str(root), "--quiet"]
    for key, value in job.items():
        argv += ["--" + key.replace("_", "-"), str(value)]
    control = f"{name}-control"
    code = follow([*argv, "--run-id", control], root / control, total=steps, title="undisturbed run", out=show)
    if code != 0:
        return _ended(code, "undisturbed run", root / control, show)
    faulty = [*argv, "--run-id", name]
    if schedule is not None:
        private_folder(root / f"{name}.plan")
        plan = root / f"{name}.plan" / "faults.json"
        schedule.save(plan)
        faulty += ["--fault-schedule", str(plan)]
        print(f"{len(schedule.faults)} faults are coming, schedule hash {schedule.hash}", file=show)
    try:
        code = follow(faulty, root / name, total=steps, title="run with faults", out=show)
    finally:
        if schedule is not None:
            plan.unlink()
            plan.parent.rmdir()
    expected = ledger_summary(read_run(root / control))["final_hash"]
    if (root / name / "run.json").exists():
        ledger = read_run(root / name)
        report = write_report(root / name, control_hash=expected)
        print_run(Console(file=show, width=None if show.isatty() else 180), ledger)
        print(f"report: {report}", file=show)
    if code != 0:
        return _ended(code, "run with faults", root / name, show)
    result = ledger_summary(ledger, control_hash=expected)
    code = _verdict(result, schedule, ledger, show)
    if json is not None:
        write_json(result, json)
    return code


def _verdict(result: dict[str, Any], schedule: Any, ledger: Any, show: Any) -> int:
    """Equal bits, and every planned fault has struck and was seen: only then it is a proof."""
    equal = result["bitwise_equal"] is True
    planned = [fault.id for fault in schedule.faults] if schedule is not None else []
    fired = {event["id"] for event in ledger.events if event["kind"] == "fault_injected"}
    missing = [fault for fault in planned if fault not in fired]
    word = "yes" if equal else "no"
    shown = result["final_hash"] if equal else f"{result['final_hash']} here, {result['control_hash']} undisturbed"
    print(
        f"final parameters and optimizer equal to the undisturbed run, bit for bit: {word} ({shown})",
        file=show,
    )
    if missing:
        print(f"these planned faults never fired: {', '.join(missing)}; the proof is void", file=show)
    if planned and not missing and not result["incidents"]:
        print("faults fired, and no incident was recorded; the proof is void", file=show)
        return int(ExitCode.PROOF_FAILED)
    return 0 if equal and not missing else int(ExitCode.PROOF_FAILED)


def _ended(code: int, what: str, run_dir: Path, show: Any) -> int:
    print(f"{what} ended with code {code}; its logs are in {run_dir / 'logs'}", file=show)
    return code
