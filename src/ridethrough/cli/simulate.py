"""`ridethrough simulate`: a fleet on paper, by the product's own generation machine, policy and ledger."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.command import App
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.usage import fail

app = App()


@app.command()
def simulate(
    case: Annotated[
        Path | None,
        typer.Option("--case", metavar="FILE", help="Your own fleet and mechanism as JSON; --example prints one."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="FILE", help="With --case: times of your own runs, by `calibrate --json`."
        ),
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a case to edit.")] = False,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Compare with measured runs: the JSON of `bench recovery`."),
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", min=0.01, help="Simulated days of every fleet; else 27, 7 and 1.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the drawn failures, for --case.")] = 42,
    json: JsonOption = None,
) -> None:
    """Simulate goodput: the published cases, fleets of 1,024, 16,384 and 100,000 GPUs, or a case of your own.

    Says what is assumed, the best interval between saves, the spare nodes needed, and where the published figures
    contradict themselves. The figures are simulated, not measured; --check shows how well it foretells what was.

    Examples:

        ridethrough simulate --json simulation.json
        ridethrough simulate --example > case.json; ridethrough simulate --case case.json
        ridethrough calibrate run-1 run-2 --json own.json; ridethrough simulate --case case.json --calibration own.json
        ridethrough simulate --check recovery.json
    """
    if example:
        print(json_format.dumps(_EXAMPLE, indent=1))
        return
    if check is not None:
        _check(check, json)
        return
    if calibration is not None and case is None:
        fail("--calibration: give the case that it is for with --case FILE; --example prints one")
    if case is not None:
        _case(case, calibration, seed, json)
        return
    from ridethrough.bench.simulation_cases import all_cases
    from ridethrough.cli.live_line import live_line

    with live_line() as tell:
        result = all_cases(days, tell)
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        _show(result)


_EXAMPLE: dict[str, Any] = {
    "fleet": {
        "num_gpus": 512,
        "gpus_per_node": 8,
        "rates": {"exception": 2.6e-6, "hang": 2e-6, "sigkill": 1.4e-6, "node_loss": 1.4e-5},
        "num_spares": 1,
        "repair_s": 14400.0,
        "horizon_s": 604800.0,
    },
    "mechanism": {
        "name": "mine",
        "rungs": True,
        "times": {
            "step_s": 4.0,
            "launch_s": 90.0,
            "init_s": 5.0,
            "restore_s": 2.0,
            "detect_s": {"exception": 0.1, "hang": 16.0, "sigkill": 0.2, "node_loss": 5.0},
            "teardown_s": 0.5,
            "rebuild_s": {"in_process": 2.0, "replace_process": 4.0, "replace_node": 8.0},
        },
        "saving": {"mode": "supersede", "interval": 100, "write_s": 40.0, "memory_every": 1},
    },
}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}; give a JSON file")
    if not isinstance(found, dict):
        fail(f"{path}: give a JSON object")
    return found


def _case(path: Path, calibration: Path | None, seed: int, json: str | None) -> None:
    from ridethrough.bench.simulation import simulate as run
    from ridethrough.bench.simulation_model import from_json, with_times

    content = _read(path)
    if calibration is not None:
        times = _read(calibration).get("times")
        if not times:
            fail(f"{calibration}: there are no times in it; `ridethrough calibrate RUN... --json FILE` writes them")
        content = with_times(content, times)
    try:
        fleet, mechanism = from_json(content)
    except ValueError as error:
        fail(f"{path}: {error}")
    outcome = run(fleet, mechanism, seed).as_json()
    if json is not None:
        write_json(outcome, json)
    if json != STANDARD_OUTPUT:
        for name, value in outcome.items():
            print(f"{name}: {value}")


def _check(path: Path, json: str | None) -> None:
    from ridethrough.bench.simulation_check import check
    from ridethrough.cli.table import print_table

    content = _read(path)
    if content.get("kind") != "recovery":
        fail(f"{path}: give the JSON of `ridethrough bench recovery` with at least two reps")
    rows = check(content)
    if json is not None:
        write_json({"kind": "simulation-check", "rows": rows}, json)
    if json != STANDARD_OUTPUT:
        header = ["mechanism", "fault", "rep", "state", "measured s", "other runs s", "simulated s", "agrees"]
        cells = [
            [r["mechanism"], r["fault"], str(r["rep"]), r["state"]]
            + [f"{r[name]:.2f}" for name in ("measured_s", "others_s", "simulated_s")]
            + ["yes" if r["agrees"] else "NO" if r["repeats"] else "no, nor do the measured runs"]
            for r in rows
        ]
        print_table(header, cells)
        print(f"{sum(r['agrees'] for r in rows)} of {len(rows)} states agree within 10 % or 0.5 s;")
        print(f"{sum(not r['repeats'] for r in rows)} differ by more than that among the measured runs;")
        course = sum(r["course_agrees"] for r in rows)
        print(f"with each run's own times as inputs, so that only the course counts, {course} agree")
    if not rows or not all(row["course_agrees"] and (row["agrees"] or not row["repeats"]) for row in rows):
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from ridethrough.cli.table import print_table

    header = ["case", "GPUs", "mechanism", "step s", "interval", "training", "infrastructure", "lost steps", "spares"]
    rows = []
    for row in result["results"]:
        shown = [row["group"], f"{row['num_gpus']:,}", row["mechanism"], f"{row['step_s']:.3g}", str(row["interval"])]
        shown += [f"{row['training_goodput']:.3f}", f"{row['infrastructure_goodput']:.3f}", str(row["steps_lost"])]
        rows.append([*shown, str(row.get("spares_needed", "-"))])
    print_table(header, rows)
    print()
    for item in result["contradictions"]:
        print(f"{item['what']} {item['arithmetic']}\n")
