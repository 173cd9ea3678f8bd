"""Names and labels of everything that belongs to a job: one function each, so that no name is guessed."""

from __future__ import annotations

from ridethrough.cluster.spec import JobSpec

COORDINATOR, TRAINER, DATA = "coordinator", "trainer", "data"
CONTAINER = "main"
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SPEC_HASH = "ridethrough/spec-hash"


def labels(spec: JobSpec, component: str | None = None) -> dict[str, str]:
    """Labels of an object; of one of its parts with `component`."""
    out = {NAME_LABEL: "ridethrough", INSTANCE_LABEL: spec.name, MANAGED_BY_LABEL: "ridethrough"}
    return out if component is None else out | {COMPONENT_LABEL: component}


def selector(spec: JobSpec, component: str | None = None) -> dict[str, str]:
    """Labels that pick the job's pods, or those of one component."""
    out = {INSTANCE_LABEL: spec.name}
    return out if component is None else out | {COMPONENT_LABEL: component}


def config_map(spec: JobSpec) -> str:
    return f"{spec.name}-job"


def token_secret(spec: JobSpec) -> str:
    return f"{spec.name}-token"


def claim(spec: JobSpec) -> str:
    """Of the PersistentVolumeClaim, made or there already."""
    return spec.storage.claim or f"{spec.name}-shared"


def volume(spec: JobSpec) -> str:
    """Of the static PersistentVolume; it belongs to no namespace."""
    return f"{spec.namespace}-{spec.name}-fsx"


def efa_template(spec: JobSpec) -> str:
    return f"{spec.name}-efa"


def service(spec: JobSpec) -> str:
    """Of the headless Service, and so the subdomain of the pods."""
    return spec.name


def coordinator_host(spec: JobSpec) -> str:
    """The coordinator's stable name, the same through all its lives, resolvable from the job's namespace."""
    if spec.backend in ("jobset", "trainjob"):
        return f"{spec.name}-{COORDINATOR}-0-0.{service(spec)}"
    if spec.backend == "job":
        return f"{spec.name}-{COORDINATOR}-0.{service(spec)}"
    return f"{spec.name}-{COORDINATOR}"


def endpoint(spec: JobSpec) -> str:
    return f"{coordinator_host(spec)}:{spec.port}"
