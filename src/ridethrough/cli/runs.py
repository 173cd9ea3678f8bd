"""`ridethrough runs`: the record of all runs below a root: list, show, search, compare, note, export, compact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.run_argument import RunName, Runs, find, index_of, read
from ridethrough.cli.table import print_lines, print_table
from ridethrough.cli.usage import fail, usage_errors

app = App(
    no_args_is_help=True,
    help="The record of all runs below a root (--runs DIR, else RIDETHROUGH_RUNS, else ./runs).",
)


@app.command("ls")
def ls(
    runs: Runs = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest first.")] = 50,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Read every run anew.")] = False,
    json: JsonOption = None,
) -> None:
    """List runs, the newest first. A run that can't be read is listed with its problem.

    Example:

        ridethrough runs ls --tag baseline --limit 10
    """
    with index_of(runs, rebuild=rebuild) as index:
        found = index.runs(tag=tag)
    if json is not None:
        write_json(found[:limit], json)
        return
    if not found:
        print(f"no run in {index.root}" + (f" with tag {tag}" if tag else ""))
        return
    header = ["run", "created", "result", "steps", "goodput", "infra", "incidents", "tags"]
    print_lines(header, [_listed(run) for run in found[:limit]])
    for run in found[:limit]:
        if run["problem"]:
            print(f"{run['run_id']} can't be read: {run['problem']}")
    if len(found) > limit:
        print(f"and {len(found) - limit} older ones: --limit shows more")


@app.command("show")
def show(run: RunName, runs: Runs = None, json: JsonOption = None) -> None:
    """One run: how it ended, its incidents, where the time went, goodputs, losses, notes.

    `--json` prints the summary that `demo --json` prints.

    Examples:

        ridethrough runs show latest
        ridethrough runs show my-run --json run.json
    """
    from ridethrough.ledger.summary import ledger_summary
    from ridethrough.report.notes import read_notes
    from ridethrough.report.terminal import print_run

    path = find(runs, run)
    ledger = read(path)
    if json is not None:
        write_json(ledger_summary(ledger), json)
        return
    result = ledger.run["result"]
    print(f"run {ledger.run['run_id']} of {ledger.run['created']} on {ledger.run['host']}")
    print("not ended" if result is None else f"ended with code {result['code']}: {result['reason']}")
    print(f"command: {' '.join(ledger.run['command'])}")
    print(f"config {ledger.run['config_hash']}, fault schedule {ledger.run['schedule_hash'] or 'none'}")
    for note in read_notes(path):
        print(f"note of {note.created} by {note.author}: {note.text} {' '.join(f'[{t}]' for t in note.tags)}".rstrip())
    print_run(Console(highlight=False), ledger)


@app.command("search")
def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS...", help="All of them must occur in the run.")],
    runs: Runs = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many runs, the best first.")] = 20,
    json: JsonOption = None,
) -> None:
    """Find runs by words in config, command, tracebacks, stacks, benchmark results, notes and tags.

    Every word must occur somewhere in the run, as a word or as the beginning of one.

    Example:

        ridethrough runs search "nccl timeout 900"
    """
    query = " ".join(words)
    with index_of(runs) as index:
        hits = index.search(query, limit=limit)
        shown = {hit.run_id: index.run(hit.run_id) or {} for hit in hits}
    if json is not None:
        places = {hit.run_id: [{"source": s, "excerpt": e} for s, e in hit.places] for hit in hits}
        write_json([{**shown[hit.run_id], "places": places[hit.run_id]} for hit in hits], json)
        return
    if not hits:
        print(f"nothing in {index.root} has all of: {query}")
        raise typer.Exit(1)
    for hit in hits:
        print("  ".join(cell for cell in _listed(shown[hit.run_id]) if cell))
        for source, excerpt in hit.places:
            print(f"    {source}: {excerpt}")


@app.command("compare")
def compare_command(
    a: RunName,
    b: RunName,
    runs: Runs = None,
    any_schedule: Annotated[
        bool, typer.Option("--any-schedule", help="Compare also runs under different fault schedules.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Two runs side by side: what differs in config and versions, and the figures.

    Refuses runs under different fault schedules, since their goodputs say nothing about each other.

    Example:

        ridethrough runs compare baseline latest
    """
    from ridethrough.report.compare import IncomparableError, compare

    with usage_errors(IncomparableError):
        found = compare(read(find(runs, a)), read(find(runs, b)), any_schedule=any_schedule)
    if json is not None:
        write_json(found.as_json(), json)
        return
    rows: list[list[str]] = []
    if found.schedule_hashes[0] != found.schedule_hashes[1]:
        rows.append(["fault schedule", *(h or "none" for h in found.schedule_hashes)])
    for title, pairs in (("config", found.config), ("version", found.versions)):
        rows += [[f"{title} {key}", str(x), str(y)] for key, (x, y) in pairs.items()]
    if not found.config:
        print("the configs are the same")
    rows += [[name, _figure(x), _figure(y)] for name, (x, y) in found.figures.items()]
    rows += [[f"{state} (s)", f"{x:.3f}", f"{y:.3f}"] for state, (x, y) in found.states_s.items() if x or y]
    print_table(["", found.a, found.b], rows)
    if found.same_result is not None:
        print(f"final parameters and optimizer equal, bit for bit: {'yes' if found.same_result else 'no'}")


@app.command("note")
def note(
    run: RunName,
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT...]", help="What there is to say.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be repeated.")] = None,
    runs: Runs = None,
    json: JsonOption = None,
) -> None:
    """Write a note into a run, or print its notes when neither text nor tags are given.

    Example:

        ridethrough runs note latest "eval_limit_s raised to 120" --tag tuned
    """
    from ridethrough.report.notes import add_note, read_notes

    path = find(runs, run)
    if text or tag:
        try:
            add_note(path, " ".join(text or []), tag)
        except OSError as error:
            fail(f"{path} cannot be written ({error.strerror}): notes need the rights of the run's owner")
    found = read_notes(path)
    if json is not None:
        write_json(
            [{"created": n.created, "author": n.author, "text": n.text, "tags": list(n.tags)} for n in found], json
        )
        return
    print_table(["written", "by", "note", "tags"], [[n.created, n.author, n.text, " ".join(n.tags)] for n in found])


@app.command("export")
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="A .csv, .json or .jsonl file; it is replaced.")],
    run: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs to export; else all of the root.")
    ] = None,
    what: Annotated[
        str, typer.Option("--what", help="runs (one row each), incidents, steps, or events (as they are, .jsonl).")
    ] = "runs",
    runs: Runs = None,
) -> None:
    """Write runs, incidents, steps or raw events into one file for other tools.

    Of all runs below the root, or of those that are named.

    Examples:

        ridethrough runs export --to runs.csv
        ridethrough runs export latest --what steps --to steps.csv
    """
    from ridethrough.report.export import ExportError, export_rows

    with usage_errors(ExportError):
        if run or what in ("steps", "events"):
            with index_of(runs) as index:
                paths = [find(runs, name) for name in run or []] or [index.root / r["run_id"] for r in index.runs()]
            count = export_rows(what, to, paths=paths)
        else:
            with index_of(runs) as index:
                count = export_rows(what, to, index=index)
    print(f"{count} {what} written to {to}")


@app.command("otel")
def otel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run, `latest` for the newest.")],
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="Of an OTLP/HTTP collector.")
    ] = "http://localhost:4318",
    runs: Runs = None,
) -> None:
    """Send a run to an OpenTelemetry collector: a trace of its incidents and their stages, and its goodput.

    Needs `pip install 'ridethrough[otel]'`.

    Example:

        ridethrough runs otel latest --endpoint http://collector:4318
    """
    from ridethrough.ledger.reading import LedgerError
    from ridethrough.ledger.rundir import RunDirError
    from ridethrough.report.otel import OtelError, send_run

    with usage_errors(OtelError, RunDirError, LedgerError):
        count = send_run(find(runs, run), endpoint)
    print(f"{count} spans sent to {endpoint}")


@app.command("compact")
def compact_command(
    run: Annotated[list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs; else all of the root.")] = None,
    runs: Runs = None,
) -> None:
    """Turn closed event files into blocks: without loss, in a tenth of the space. Long jobs do it as they run.

    Example:

        ridethrough runs compact my-run
    """
    from ridethrough.ledger.compact import compact
    from ridethrough.ledger.rundir import runs_root
    from ridethrough.report.index import run_folders

    root = runs_root(runs)
    if not run and not root.is_dir():
        fail(f"{root} is no folder of runs: name one with --runs DIR")
    for path in [find(runs, name) for name in run] if run else run_folders(root):
        try:
            made = compact(path)
        except OSError as error:
            if not run:
                print(f"{path.name}: cannot be written ({error.strerror})")
                continue
            fail(f"{path} cannot be written ({error.strerror}): compacting needs the rights of the run's owner")
        print(f"{path.name}: {len(made)} blocks made")


def _listed(run: dict[str, Any]) -> list[str]:
    result = "-" if run["code"] is None else str(run["code"])
    if run["problem"]:
        return [
            run["run_id"],
            (run["created"] or "-")[:16].replace("T", " "),
            "?",
            "",
            "",
            "",
            "",
            " ".join(run["tags"]),
        ]
    return [
        run["run_id"],
        (run["created"] or "-")[:16].replace("T", " "),
        result,
        str(run["steps"]),
        f"{run['training_goodput']:.2%}",
        f"{run['infrastructure_goodput']:.2%}",
        str(run["num_incidents"]),
        " ".join(run["tags"]),
    ]


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
