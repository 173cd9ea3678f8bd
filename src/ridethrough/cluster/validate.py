"""All checks in one call: of a spec with what is rendered from it, or of objects from any source."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridethrough.cluster.job_checks import JOB_CHECKS
from ridethrough.cluster.objects import Object
from ridethrough.cluster.pod_checks import POD_CHECKS, duplicates
from ridethrough.cluster.render import render
from ridethrough.cluster.schemas import Problem, check_schemas, versions
from ridethrough.cluster.spec import JobSpec
from ridethrough.cluster.spec_checks import check_spec
from ridethrough.cluster.workloads import workloads

_ANY_TOKEN = "0" * 64


@dataclass(frozen=True)
class Report:
    """What was checked and what is wrong. `kubernetes` is empty where the schemas are not installed."""

    num_objects: int
    kubernetes: list[str]
    problems: list[Problem] = field(default_factory=list)


def validate_spec(spec: JobSpec, extras: list[Object] | None = None, *, every_version: bool = False) -> Report:
    """Check a spec, then everything that is rendered from it."""
    problems = check_spec(spec)
    if any(problem.rule == "faults" for problem in problems):  # nothing can be rendered
        return Report(0, [], problems)
    report = validate_objects(render(spec, token=_ANY_TOKEN, extras=extras), every_version=every_version)
    # The spec's own words say better what the rendered pods would repeat.
    said = {problem.rule for problem in problems}
    repeated = [p for p in report.problems if p.rule == "grace" and "grace" in said]
    return Report(report.num_objects, report.kubernetes, problems + [p for p in report.problems if p not in repeated])


def validate_objects(rendered: list[Object], *, every_version: bool = False) -> Report:
    """Check objects against the oldest and the newest Kubernetes that is known (or every one), then their meaning."""
    found = versions()
    kubernetes = found if every_version else sorted({found[0], found[-1]}, key=found.index) if found else []
    problems = check_schemas(rendered, kubernetes)
    if problems:  # what has no form has no meaning
        return Report(len(rendered), kubernetes, problems)
    problems += duplicates(rendered)
    for load in workloads(rendered):
        for pod_check in POD_CHECKS:
            problems += pod_check(load, rendered)
    for job_check in JOB_CHECKS:
        problems += job_check(rendered)
    return Report(len(rendered), kubernetes, problems)
