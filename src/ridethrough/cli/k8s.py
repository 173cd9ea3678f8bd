"""`ridethrough k8s`: from one file to a protected job on a cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridethrough.cli.command import App
from ridethrough.cli.json_option import JsonOption, write_json
from ridethrough.cli.usage import fail

if TYPE_CHECKING:
    from ridethrough.cluster.api import Api
    from ridethrough.cluster.spec import JobSpec

app = App(
    no_args_is_help=True,
    help="One file, one job: make it, check it, submit it, follow it, take its results home.",
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="The job, as `ridethrough k8s init` writes it.")]


@app.command()
def init(
    profile: Annotated[str, typer.Option("--profile", help="eks-p5, eks-p4de, eks-g5, generic-gpu or cpu.")],
    name: Annotated[str, typer.Option("--name", help="Of the job.")] = "train",
) -> None:
    """Print a commented job file for a kind of machine.

    It is valid as it is.

    Example:

        ridethrough k8s init --profile eks-p5 > job.yaml
    """
    from ridethrough.cluster.template import template

    with _spec_errors():
        sys.stdout.write(template(profile, name))


@app.command()
def render(
    file: JobFile,
    with_token: Annotated[
        bool, typer.Option("--with-token", help="Draw a token and print its Secret too; keep the output to yourself.")
    ] = False,
) -> None:
    """Print the objects.

    They are the same for the same file. Needs no cluster.

    Example:

        ridethrough k8s render job.yaml | kubectl apply -f -
    """
    from ridethrough.cluster.render import render as objects_of
    from ridethrough.cluster.render import to_yaml
    from ridethrough.faults.schedule import ScheduleError

    spec = _load(file)
    with _spec_errors(ScheduleError):
        rendered = objects_of(spec, token=_token() if with_token else None, extras=_extras(spec))
        sys.stdout.write(to_yaml(rendered, spec))


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job file, or rendered objects.")],
    all_versions: Annotated[
        bool, typer.Option("--all-versions", help="Every Kubernetes from 1.30 on, not only the oldest and the newest.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check a job, or objects from any source, without a cluster. Exits with 2 if something is wrong.

    Schemas (strict: unknown fields are errors) and what schemas miss: retry rules against the launcher's exit codes,
    dangling mounts and keys, quantities, names, ports, rights, memory, limits that nest.

    Examples:

        ridethrough k8s validate job.yaml
        helm template chart/ > objects.yaml; ridethrough k8s validate objects.yaml
    """
    from ridethrough.cluster.reading import load_yaml_documents
    from ridethrough.cluster.validate import validate_objects, validate_spec

    with _spec_errors():
        try:
            documents = load_yaml_documents(file.read_text(encoding="utf-8"))
        except OSError as error:
            fail(f"{file}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"{file}: not text in UTF-8; give the YAML of a job or of objects")
    if documents and all(isinstance(document, dict) and "kind" in document for document in documents):
        report = validate_objects(documents, every_version=all_versions)
    else:
        spec = _load(file)
        report = validate_spec(spec, _extras(spec), every_version=all_versions)
    if json is not None:
        found: dict[str, Any] = {"objects": report.num_objects, "kubernetes": report.kubernetes}
        found["problems"] = [{"rule": p.rule, "where": p.where, "message": p.message} for p in report.problems]
        write_json(found, json)
    else:
        for problem in report.problems:
            sys.stdout.write(f"{problem}\n")
        against = (
            f"Kubernetes {', '.join(report.kubernetes)}"
            if report.kubernetes
            else "no Kubernetes schemas (pip install kubernetes-validate)"
        )
        sys.stdout.write(f"{report.num_objects} objects, {against}: {len(report.problems) or 'no'} problems\n")
    if report.problems:
        raise typer.Exit(2)


JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's file, or its name.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Of a job that is given by name; else `default`.")
]
Context = Annotated[
    str | None, typer.Option("--context", help="Of the kubeconfig; else the current one, or the pod's own account.")
]


@app.command()
def submit(
    file: JobFile,
    wait: Annotated[bool, typer.Option("--wait", help="Until it ends; then exit with the launcher's code.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Make nothing; ask the cluster, if there is one, what it would say to each object."
        ),
    ] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", min=1, metavar="SECONDS", help="Of --wait.")] = None,
    context: Context = None,
) -> None:
    """Start a job: all of its objects, or none.

    What `validate` refuses is not sent.

    Examples:

        ridethrough k8s submit job.yaml --wait
        ridethrough k8s submit job.yaml --dry-run
    """
    from ridethrough.cluster.api import ApiError
    from ridethrough.cluster.submit import submit as send
    from ridethrough.cluster.submit import would_make
    from ridethrough.cluster.validate import validate_spec

    spec = _load(file)
    extras = _extras(spec)
    report = validate_spec(spec, extras)
    if report.problems:
        fail("\n".join([f"{file}:", *(f"  {problem}" for problem in report.problems)]))
    with _cluster_errors():
        try:
            api = _api(context)
        except ApiError as error:
            if not dry_run or error.kind != "no_cluster":
                raise
            for line in [*would_make(spec, extras), str(error)]:
                _say(line)
            return
        send(api, spec, extras=extras, dry_run=dry_run, say=_say)
        if wait and not dry_run:
            _follow(api, spec.name, spec.namespace, timeout)


@app.command()
def status(
    job: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Until it ends; then exit with the launcher's code.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", min=1, metavar="SECONDS", help="Of --wait.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    json: JsonOption = None,
) -> None:
    """Show a job's phase, its pods with the meaning of their exit codes, and the last warnings.

    Exits with 1 if there is no such job.

    Example:

        ridethrough k8s status job.yaml --wait
    """
    from ridethrough.cli.table import print_table
    from ridethrough.cluster.status import job_status

    name, place = _name(job, namespace)
    with _cluster_errors():
        api = _api(context)
        if wait:
            _follow(api, name, place, timeout)
        found = job_status(api, name, place)
    if json is not None:
        write_json(found.as_json(), json)
    else:
        words = [word for word in (found.reason, found.message) if word]
        restarts = f", {found.restarts} restarts of the whole" if found.restarts else ""
        sys.stdout.write(f"{name}: {found.phase}{restarts}{': ' if words else ''}{'; '.join(words)}\n")
        rows = [
            [pod.name, pod.phase, pod.reason or "-", pod.ended or "-", pod.node or "-", pod.started or "-"]
            for pod in found.pods
        ]
        if rows:
            print_table(["pod", "phase", "reason", "ended", "node", "started"], rows)
        for warning in found.warnings:
            sys.stdout.write(f"! {warning}\n")
    if found.phase == "missing":
        raise typer.Exit(1)


@app.command()
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the job ends; new pods join.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's lines, wherever it runs.")] = None,
    component: Annotated[
        str | None, typer.Option("--component", help="coordinator, trainer or data; else all.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Only the last lines of each pod.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show the output of a job's pods, each line with its pod; with --rank the lines of that rank alone.

    Logs of pods that are gone are in the run's folder: `ridethrough k8s collect`.

    Example:

        ridethrough k8s logs job.yaml --follow --rank 0
    """
    from ridethrough.cluster.pod_logs import stream

    name, place = _name(job, namespace)
    with _cluster_errors():
        for pod, line in stream(_api(context), name, place, follow=follow, rank=rank, component=component, tail=tail):
            sys.stdout.write(f"{line}\n" if rank is not None else f"{pod}: {line}\n")
            sys.stdout.flush()


@app.command()
def collect(
    file: JobFile,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; else runs/NAME.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Fetch checkpoints too; they are large.")] = False,
    context: Context = None,
) -> None:
    """Bring the run's folder here: events, logs, incidents, report. Hashes are checked; what is there stays.

    Then `ridethrough runs show`, `report` and the others work on it as on a local run.

    Example:

        ridethrough k8s collect job.yaml --out runs/train
    """
    from ridethrough.cluster.collect import collect as fetch

    spec = _load(file)
    with _cluster_errors():
        got = fetch(_api(context), spec, out or Path("runs") / spec.name, checkpoints=checkpoints, say=_say)
    there = f", {got.num_there} were there" if got.num_there else ""
    sys.stdout.write(f"{got.folder}: {got.num_files} files, {got.num_bytes / 1e6:.1f} MB fetched{there}\n")


@app.command()
def delete(
    job: JobName,
    with_claim: Annotated[
        bool, typer.Option("--with-claim", help="Also the volume claim. FSx keeps its data, other classes may not.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Delete a job in order and wait until its pods have ended. Results stay on the volume.

    Example:

        ridethrough k8s delete job.yaml
    """
    from ridethrough.cluster.submit import delete as remove

    name, place = _name(job, namespace)
    with _cluster_errors():
        deleted = remove(_api(context), name, place, with_claim=with_claim, say=_say)
    sys.stdout.write(f"{name}: {len(deleted)} objects deleted\n")


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A job that should run there.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    json: JsonOption = None,
) -> None:
    """Look at what the cluster offers: version, kinds, GPUs, EFA, volumes, quota, our rights. Changes nothing.

    Exits with 1 if something is missing that the job (or every job) needs.

    Example:

        ridethrough k8s doctor job.yaml
    """
    import dataclasses

    from ridethrough.cli.table import print_table
    from ridethrough.cluster.doctor import examine, ok

    spec = _load(file) if file is not None else None
    place = spec.namespace if spec is not None else namespace or "default"
    with _cluster_errors():
        findings = examine(_api(context), place, spec)
    if json is not None:
        write_json([dataclasses.asdict(finding) for finding in findings], json)
    else:
        rows = [[f.item, f.verdict if f.needed or f.verdict != "FAIL" else "note", f.detail] for f in findings]
        print_table(["item", "verdict", "detail"], rows)
    if not ok(findings):
        raise typer.Exit(1)


def _name(job: str, namespace: str | None) -> tuple[str, str]:
    """(name, namespace) of a job that is given by its file or by its name."""
    if Path(job).is_file():
        spec = _load(Path(job))
        return spec.name, spec.namespace
    if "/" in job or job.endswith((".yaml", ".yml")):
        fail(f"{job}: no such file")
    return job, namespace or "default"


def _api(context: str | None) -> Api:
    from ridethrough.cluster.api import Api

    return Api.connect(context)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _follow(api: Api, name: str, namespace: str, timeout_s: float | None) -> None:
    """Wait for the end, saying each change; exits with the launcher's code if the job has failed."""
    from ridethrough.cluster.status import JobStatus, wait

    def seen(now: JobStatus) -> None:
        pods = {phase: sum(pod.phase == phase for pod in now.pods) for phase in ("Pending", "Running", "Failed")}
        counts = ", ".join(f"{number} {phase.lower()}" for phase, number in pods.items() if number)
        _say(f"{name}: {now.phase}" + (f" ({counts})" if counts else "") + (f": {now.message}" if now.message else ""))

    ended = wait(api, name, namespace, timeout_s=timeout_s, seen=seen)
    if ended.phase != "succeeded":
        raise typer.Exit(ended.exit_code)


@contextlib.contextmanager
def _cluster_errors() -> Iterator[None]:
    """One line for what the cluster refuses; exit 1, since the command was well used."""
    from ridethrough.cluster.api import ApiError

    try:
        with _spec_errors():
            yield
    except ApiError as error:
        sys.stdout.flush()
        sys.stderr.write(f"ridethrough: {error}\n")
        raise typer.Exit(1) from None


def _load(file: Path) -> JobSpec:
    from ridethrough.cluster.reading import load_spec

    with _spec_errors():
        return load_spec(file)


def _token() -> str:
    import secrets

    return secrets.token_hex(32)


def _extras(spec: JobSpec) -> list[dict[str, Any]]:
    """Alert rules and dashboard, as the report room ships them, if the job is to be monitored."""
    if not spec.options.monitoring:
        return []
    import json as json_format
    from importlib.resources import files

    from ridethrough.cluster import monitoring
    from ridethrough.cluster.reading import load_yaml

    shipped = files("ridethrough.report").joinpath("static")
    out = []
    rules, board = shipped.joinpath("alerts.yaml"), shipped.joinpath("grafana.json")
    if rules.is_file():
        out.append(monitoring.alert_rules(spec, load_yaml(rules.read_text(encoding="utf-8"))["groups"]))
    if board.is_file():
        out.append(monitoring.dashboard(spec, json_format.loads(board.read_text(encoding="utf-8"))))
    return out


def _spec_errors(*more: type[Exception]) -> Any:
    from ridethrough.cli.usage import usage_errors
    from ridethrough.cluster.spec import SpecError

    return usage_errors(SpecError, *more)
