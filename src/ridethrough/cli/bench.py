"""`ridethrough bench`: recovery, checkpoints and the user's own script, measured beside every peer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ridethrough.cli.bench_checkpoint import checkpoint
from ridethrough.cli.bench_gpu import gpu
from ridethrough.cli.bench_memory import memory
from ridethrough.cli.bench_shadow import shadow
from ridethrough.cli.command import App
from ridethrough.cli.json_option import STANDARD_OUTPUT, JsonOption, write_json
from ridethrough.cli.usage import fail, usage_errors

app = App(no_args_is_help=True)

_DEFAULT_MECHANISMS = "ridethrough,ridethrough-process,torchrun,restart-job"


@app.callback()
def root() -> None:
    """Measure: recovery from faults and the cost of checkpoints, beside every peer, in one run on one machine."""


app.command()(checkpoint)
app.command()(gpu)
app.command()(memory)
app.command(context_settings={"allow_extra_args": True})(shadow)

PeerEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--peer-env",
        metavar="NAME=PATH",
        help="A virtual environment with a peer: nvrx, torchft or torchrun (else this one); may be repeated.",
    ),
]


@app.command()
def recovery(
    mechanisms: Annotated[
        str, typer.Option("--mechanisms", metavar="A,B,...", help="Which to run, or `all`; `list` explains them.")
    ] = _DEFAULT_MECHANISMS,
    faults: Annotated[
        str, typer.Option("--faults", metavar="KIND,...", help="Kinds of fault; ridethrough-node loses a node instead.")
    ] = "exception,sigkill",
    reps: Annotated[int, typer.Option("--reps", min=1, help="Runs of each pair, interleaved.")] = 3,
    peer_env: PeerEnv = None,
    seed: Annotated[int, typer.Option("--fault-seed", help="Of what is drawn; part of the schedule's hash.")] = 42,
    fault_at: Annotated[
        str, typer.Option("--fault-at", metavar="STEP:RANK|drawn", help="Where each fault strikes.")
    ] = "6:1",
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Processes of the job (even for a lost node).")] = 4,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Optimizer steps of each run.")] = 10,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between checkpoints.")] = 4,
    dim: Annotated[int, typer.Option("--dim", min=8, help="Width of the model; 512 with 5 layers is 20 M.")] = 512,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the model.")] = 5,
    timeout: Annotated[
        float, typer.Option("--gloo-timeout", metavar="SECONDS", help="Of the process groups, for all mechanisms.")
    ] = 10.0,
    clock_factor: Annotated[
        float,
        typer.Option(
            "--clock-factor",
            min=1,
            help="kubernetes-pods waits and times out so many times faster; above 1 is unfair to it, since "
            "its processes start no faster.",
        ),
    ] = 1.0,
    straggle: Annotated[
        float,
        typer.Option(
            "--straggle",
            min=0,
            metavar="SECONDS",
            help="The rank to be struck stands still so long before, so that its peers wait in their collective: "
            "longer than a step, and too short for a hang.",
        ),
    ] = 0.0,
    same_checkpoint: Annotated[
        bool, typer.Option("--same-checkpoint", help="ridethrough saves with torch.save like the others, too.")
    ] = False,
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", help="Longest time of one run.")] = 400.0,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep logs and events of each run here.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Let every mechanism meet the same fault in the same small job, and time how it comes back.

    All times count from the fault and come from the workload's own events, never from a launcher's. Ends with a
    table: median, tails, and the ratio to the fastest. A peer without an environment is said and left out.

    Examples:

        ridethrough bench recovery --reps 5
        ridethrough bench recovery --mechanisms all --faults exception,hang,sigkill --peer-env nvrx=.venv-peers
    """
    from ridethrough.bench.mechanisms import MECHANISMS, WorkloadSize
    from ridethrough.bench.recovery import FAULTS, Matrix, fault_schedule, run_matrix
    from ridethrough.bench.spread import recovery_table
    from ridethrough.cli.table import print_table
    from ridethrough.faults.schedule import ScheduleError

    if mechanisms == "list":
        print_table(["mechanism", "what it is"], [[name, row.about] for name, row in MECHANISMS.items()])
        return
    names = chosen("--mechanisms", mechanisms, MECHANISMS)
    kinds = chosen("--faults", faults, FAULTS)
    size = WorkloadSize(
        world_size=ranks,
        steps=steps,
        save_every=save_every,
        dim=dim,
        layers=layers,
        timeout_s=timeout,
        clock_factor=clock_factor,
        straggle_s=straggle,
        own_checkpoint=not same_checkpoint,
    )
    if "ridethrough-node" in names and ranks % 2:
        fail(f"--ranks {ranks}: ridethrough-node has two nodes, give an even number")
    at = None if fault_at == "drawn" else _step_and_rank(fault_at, steps, ranks)
    with usage_errors(ScheduleError):
        schedule = fault_schedule(kinds, reps, seed, size, at)
    matrix = Matrix(names, kinds, reps, schedule, size, peers(peer_env), limit, keep)
    _tell(f"schedule hash {schedule.hash}, clock factor of kubernetes-pods {clock_factor:g}")
    result = run_matrix(matrix, _tell)
    result["table"] = recovery_table(result["results"])
    if json is not None:
        write_json(result, json)
    if json != STANDARD_OUTPUT:
        _show_recovery(result)
    if result["cut_off"]:
        raise typer.Exit(130)
    if any(row["error"] for row in result["results"]):
        raise typer.Exit(1)


def _show_recovery(result: dict[str, Any]) -> None:
    from ridethrough.cli.table import print_lines

    header = [
        "fault",
        "mechanism",
        "recovered",
        "equal",
        "detected",
        "all out",
        "first step",
        "p95",
        "max",
        "caught up",
    ]
    rows = []
    for row in result["table"]:
        first = row["first_step_s"]
        cells = [row["fault"], row["mechanism"], f"{row['recovered']}/{row['runs']}", str(row["final_equal"])]
        cells += [_median(row["detected_s"]), _median(row["all_out_s"]), _median(first)]
        cells += [f"{first[name]:.2f}" if first else "-" for name in ("p95", "max")]
        cells += [_median(row["caught_up_s"]), f"{row['steps_lost']:g}" if row["steps_lost"] is not None else "-"]
        cells += [f"{row['ratio']:.1f}x" if row["ratio"] else "-"]
        rows.append(cells)
    print_lines([*header, "lost", "ratio"], rows)
    for row in result["missing"]:
        print(f"not measured: {row['mechanism']}: {row['error']}")


def _median(spread: dict[str, Any] | None) -> str:
    return f"{spread['median']:.2f}" if spread else "-"


@app.command()
def page(
    folder: Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder of the JSON files.")] = Path(
        "docs/benchmarks"
    ),
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("docs/benchmarks.md"),
    only_check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if the page is not that of the files.")
    ] = False,
) -> None:
    """Make the page of the benchmarks and its plots from the JSON of `bench recovery`, `bench checkpoint`, `simulate`.

    The plots are SVG files in the folder `plots` beside the JSON.

    Example:

        ridethrough bench page --from docs/benchmarks --out docs/benchmarks.md
    """
    from ridethrough.bench.page import page as make

    plots = folder / "plots"
    with usage_errors(OSError, ValueError, KeyError):
        made = make(folder)
        files = {out: made.text, **{plots / name: drawing for name, drawing in made.plots.items()}}
        old = {path: path.read_text(encoding="utf-8") for path in [out, *plots.glob("*.svg")] if path.is_file()}
        if only_check and old != files:
            _tell(f"{out} and its plots are not what {folder} says: run `ridethrough bench page`")
            raise typer.Exit(1)
        if not only_check:
            plots.mkdir(parents=True, exist_ok=True)
            for path in old.keys() - files.keys():
                path.unlink()
            for path, text in files.items():
                path.write_text(text, encoding="utf-8")


def chosen(flag: str, text: str, known: Any) -> list[str]:
    """The names in a list of an option; exits with 2 on one that is unknown."""
    if text == "all":
        return list(known)
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in known:
            fail(f"{flag}: {name!r} is none of {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        fail(f"{flag} {text!r}: name at least one, each once, among {', '.join(known)}")
    return names


def _step_and_rank(text: str, steps: int, ranks: int) -> tuple[int, int]:
    step, _, rank = text.partition(":")
    if not step.isdigit() or not rank.isdigit() or not 2 <= int(step) <= steps or int(rank) >= ranks:
        fail(f"--fault-at {text}: give STEP:RANK with a step in 2..{steps} and a rank in 0..{ranks - 1}, or `drawn`")
    return int(step), int(rank)


def peers(entries: list[str] | None) -> dict[str, Path]:
    """What `--peer-env` says, by name."""
    known = ("nvrx", "torchft", "torchrun")
    out = {}
    for entry in entries or []:
        name, _, path = entry.partition("=")
        if name not in known or not path:
            fail(f"--peer-env {entry}: give NAME=PATH with a name among {', '.join(known)}")
        out[name] = Path(path).absolute()
    return out


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
