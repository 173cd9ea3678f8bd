"""`ridethrough k8s`: from one file to a protected job on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridethrough.cli.json_option import JsonCommand, JsonOption, write_json
from ridethrough.cli.usage import fail

if TYPE_CHECKING:
    from ridethrough.cluster.spec import JobSpec

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="One file, one job: make it, check it, submit it, follow it, take its results home.",
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="The job, as `ridethrough k8s init` writes it.")]


@app.command()
def init(
    profile: Annotated[str, typer.Option("--profile", help="eks-p5, eks-p4de, eks-g5, generic-gpu or cpu.")],
    name: Annotated[str, typer.Option("--name", help="Of the job.")] = "train",
) -> None:
    """Print a commented job file for a kind of machine; valid as it is.

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
    """Print the objects; the same for the same file. Needs no cluster.

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


@app.command(cls=JsonCommand)
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
    """
    from ridethrough.cluster.reading import load_yaml_documents
    from ridethrough.cluster.validate import validate_objects, validate_spec

    with _spec_errors():
        try:
            documents = load_yaml_documents(file.read_text(encoding="utf-8"))
        except OSError as error:
            fail(f"{file}: {error.strerror}")
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


def _load(file: Path) -> JobSpec:
    from ridethrough.cluster.reading import load_spec

    with _spec_errors():
        return load_spec(file)


def _token() -> str:
    import secrets

    return secrets.token_hex(32)


def _extras(spec: JobSpec) -> list[dict[str, Any]]:
    """Dashboards and alerts, which another room makes."""
    return []


def _spec_errors(*more: type[Exception]) -> Any:
    from ridethrough.cli.usage import usage_errors
    from ridethrough.cluster.spec import SpecError

    return usage_errors(SpecError, *more)
