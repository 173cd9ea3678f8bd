"""What became of a job: one phase, its pods with the meaning of their exit codes, the last warnings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridethrough.cluster import naming
from ridethrough.cluster.api import Address, Api, ApiError
from ridethrough.cluster.objects import Object
from ridethrough.generation.exit_codes import describe

Phase = Literal["missing", "queued", "starting", "running", "succeeded", "failed"]
_POLL_S = 2.0
_WARNINGS = 10


@dataclass(frozen=True)
class PodStatus:
    """One pod. `exit_code` and `ended` are of its last container that ended."""

    name: str
    component: str
    index: int | None
    node: str | None
    phase: str
    reason: str
    exit_code: int | None
    ended: str
    restarts: int
    started: str | None


@dataclass(frozen=True)
class JobStatus:
    """`reason` and `message` are the orchestrator's; `restarts` counts starts of the whole set after the first."""

    name: str
    namespace: str
    backend: str | None
    phase: Phase
    reason: str
    message: str
    restarts: int
    pods: list[PodStatus]
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def exit_code(self) -> int:
        """0 if it succeeded; else the launcher's own code, from the training pod that ended last; 1 if none tells."""
        if self.phase == "succeeded":
            return 0
        ended = [pod for pod in self.pods if pod.exit_code and pod.component == naming.TRAINER]
        return next((pod.exit_code for pod in reversed(ended) if pod.exit_code), 1)


def job_status(api: Api, name: str, namespace: str) -> JobStatus:
    """The state of a job now; phase "missing" if there is none. Raises ApiError."""
    selector = f"{naming.INSTANCE_LABEL}={name}"
    backend, conditions, restarts = _envelope(api, name, namespace)
    pods = sorted(
        (_pod(thing) for thing in api.list(Address("v1", "Pod", namespace), selector)),
        key=lambda pod: (pod.component, pod.index if pod.index is not None else -1, pod.started or ""),
    )
    phase, reason, message = _phase(backend, conditions, pods)
    warnings = _warnings(api, name, namespace) if phase in ("starting", "failed", "queued") else []
    return JobStatus(name, namespace, backend, phase, reason, message, restarts, pods, warnings)


def wait(
    api: Api, name: str, namespace: str, *, timeout_s: float | None, seen: Callable[[JobStatus], None]
) -> JobStatus:
    """Until the job has ended; `seen` gets each state that differs from the one before. Raises ApiError timeout."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    before: JobStatus | None = None
    while True:
        now = job_status(api, name, namespace)
        if before is None or _short(now) != _short(before):
            seen(now)
        before = now
        if now.phase in ("succeeded", "failed", "missing"):
            return now
        if end is not None and time.monotonic() >= end:
            raise ApiError("timeout", f"job {name} is {now.phase} after {timeout_s:g} s; it goes on")
        api.sleep(_POLL_S)


def _short(status: JobStatus) -> tuple[Any, ...]:
    return status.phase, status.restarts, [(pod.name, pod.phase, pod.exit_code) for pod in status.pods]


def _envelope(api: Api, name: str, namespace: str) -> tuple[str | None, list[Object], int]:
    """(backend, conditions that are true, restarts) of the object that holds the job."""
    for backend, api_version, kind, own_name in (
        ("jobset", "jobset.x-k8s.io/v1alpha2", "JobSet", name),
        ("job", "batch/v1", "Job", f"{name}-{naming.TRAINER}"),
    ):
        found = api.find(Address(api_version, kind, namespace), own_name)
        if found is not None:
            status = found.get("status") or {}
            conditions = [c for c in status.get("conditions") or [] if c.get("status") == "True"]
            return backend, conditions, int(status.get("restarts") or 0)
    return None, [], 0


def _phase(backend: str | None, conditions: list[Object], pods: list[PodStatus]) -> tuple[Phase, str, str]:
    if backend is None:
        return "missing", "", "no such job"
    for kind, phase in (
        ("Completed", "succeeded"),
        ("Complete", "succeeded"),
        ("Failed", "failed"),
        ("Suspended", "queued"),
    ):
        found = next((c for c in conditions if c["type"] == kind), None)
        if found is not None:
            return phase, str(found.get("reason") or ""), str(found.get("message") or "")  # type: ignore[return-value]
    trainers = [pod for pod in pods if pod.component == naming.TRAINER]
    if any(pod.phase == "Running" for pod in trainers):
        waiting = sum(pod.phase == "Pending" for pod in trainers)
        return "running", "", f"{waiting} pods are pending" if waiting else ""
    reasons = sorted({pod.reason for pod in pods if pod.phase == "Pending" and pod.reason})
    return "starting", ", ".join(reasons), "" if pods else "no pods yet"


def _pod(thing: Object) -> PodStatus:
    metadata, status = thing["metadata"], thing.get("status") or {}
    labels = metadata.get("labels") or {}
    containers = status.get("containerStatuses") or []
    main: Object = next((c for c in containers if c.get("name") in (naming.CONTAINER, "node")), {})
    ended = (main.get("state") or {}).get("terminated") or (main.get("lastState") or {}).get("terminated") or {}
    waiting = (main.get("state") or {}).get("waiting") or {}
    code = ended.get("exitCode")
    reason = str(status.get("reason") or waiting.get("reason") or ended.get("reason") or "")
    disrupted = [c for c in status.get("conditions") or [] if c["type"] == "DisruptionTarget" and c["status"] == "True"]
    if disrupted:
        reason = str(disrupted[0].get("reason") or "disrupted")
    if metadata.get("deletionTimestamp"):
        reason = reason or "Terminating"
    index = labels.get("batch.kubernetes.io/job-completion-index")
    return PodStatus(
        name=metadata["name"],
        component=labels.get(naming.COMPONENT_LABEL, ""),
        index=None if index is None else int(index),
        node=(thing.get("spec") or {}).get("nodeName"),
        phase=status.get("phase", "Pending"),
        reason=reason,
        exit_code=code,
        ended="" if code is None else "killed for memory" if ended.get("reason") == "OOMKilled" else describe(code),
        restarts=int(main.get("restartCount") or 0),
        started=status.get("startTime"),
    )


def _warnings(api: Api, name: str, namespace: str) -> list[str]:
    """The last warnings about objects of the job; none if we may not read events."""
    try:
        events = api.list(Address("v1", "Event", namespace))
    except ApiError as error:
        if error.kind == "forbidden":
            return []
        raise
    own = []
    for event in events:
        about = event.get("involvedObject") or {}
        if event.get("type") == "Warning" and str(about.get("name", "")).startswith(name):
            when = event.get("lastTimestamp") or event.get("eventTime") or ""
            own.append(
                (when, f"{about.get('kind')}/{about.get('name')}: {event.get('reason')}: {event.get('message')}")
            )
    return [text for _, text in sorted(own)[-_WARNINGS:]]
