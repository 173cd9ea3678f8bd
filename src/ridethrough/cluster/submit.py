"""Bring a job to the cluster, whole or not at all; take it away again in order."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable

from ridethrough.cluster import naming
from ridethrough.cluster.api import MARK, Address, Api, ApiError, address
from ridethrough.cluster.objects import Object, spec_hash
from ridethrough.cluster.render import render
from ridethrough.cluster.schemas import identity
from ridethrough.cluster.spec import JobSpec, SpecError

SUBMITTED_BACKENDS = ("jobset", "job")
_SHARED_KINDS = frozenset({"PersistentVolume", "PersistentVolumeClaim", "PriorityClass"})
"""May be there from an earlier job, and stay: they hold data or belong to others too."""
_OPTIONAL_KINDS = frozenset({"TrainJob", "TrainingRuntime", "ResourceClaimTemplate", "PodMonitor", "PrometheusRule"})
_POLL_S = 2.0


def submit(
    api: Api,
    spec: JobSpec,
    *,
    extras: list[Object] | None = None,
    dry_run: bool = False,
    data_timeout_s: float = 24 * 3600.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Create all objects of a job in order; returns what was made.

    If one cannot be made, those made before it by this call are deleted again and the error goes on. The data
    preparation, if any, is waited for before pods with GPUs are asked for. `dry_run` only asks the cluster.

    Raises ApiError: conflict if a job of this name is there; SpecError for a backend that is only rendered.
    """
    if spec.backend not in SUBMITTED_BACKENDS:
        raise SpecError(
            f"backend {spec.backend} is rendered and validated only: ridethrough k8s render FILE | kubectl apply -f -"
        )
    mark = secrets.token_hex(8)
    made: list[Object] = []
    words: list[str] = []
    try:
        for thing in render(spec, token=secrets.token_hex(32), extras=extras):
            marked = _marked(thing, mark, spec)
            if thing["kind"] in _SHARED_KINDS and api.find(address(thing), thing["metadata"]["name"]) is not None:
                words.append(f"{identity(thing)} is there")
                say(words[-1])
                continue
            api.create(marked, dry_run=dry_run)
            made.append(marked)
            words.append(f"{identity(thing)} {'would be made' if dry_run else 'made'}")
            say(words[-1])
            if thing["kind"] == "Job" and thing["metadata"]["name"] == f"{spec.name}-{naming.DATA}" and not dry_run:
                _wait_for_data(api, spec, data_timeout_s, say)
    except BaseException:  # also Ctrl-C: half a job would wait for its other half
        if not dry_run:
            _roll_back(api, made, say)
        raise
    return words


def would_make(spec: JobSpec, extras: list[Object] | None = None) -> list[str]:
    """What `submit` would make, without asking any cluster."""
    return [f"{identity(thing)} would be made" for thing in render(spec, token=secrets.token_hex(32), extras=extras)]


def _marked(thing: Object, mark: str, spec: JobSpec) -> Object:
    out = copy.deepcopy(thing)
    annotations = out["metadata"].setdefault("annotations", {})
    annotations |= {MARK: mark, naming.SPEC_HASH: spec_hash(spec)}
    return out


def _roll_back(api: Api, made: list[Object], say: Callable[[str], None]) -> None:
    for thing in reversed(made):
        try:
            api.delete(address(thing), thing["metadata"]["name"])
            say(f"{identity(thing)} deleted again")
        except ApiError as error:  # the first error is the one to tell
            say(f"{identity(thing)} is left over: {error}")


def _wait_for_data(api: Api, spec: JobSpec, timeout_s: float, say: Callable[[str], None]) -> None:
    name = f"{spec.name}-{naming.DATA}"
    where = Address("batch/v1", "Job", spec.namespace)
    say(f"waiting for the data: Job/{name}")
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        conditions = (api.get(where, name).get("status") or {}).get("conditions") or []
        states = {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}
        if "Complete" in states:
            return
        if "Failed" in states:
            why = states["Failed"].get("message") or states["Failed"].get("reason") or ""
            raise ApiError("invalid", f"Job/{name}: the data preparation failed ({why}): see `ridethrough k8s logs`")
        api.sleep(_POLL_S)
    raise ApiError("timeout", f"Job/{name}: no data after {timeout_s:g} s")


def delete(
    api: Api,
    name: str,
    namespace: str,
    *,
    with_claim: bool = False,
    timeout_s: float = 900.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Delete a job and everything that was made for it, in order: the job, its pods' ends, the rest.

    The claim and its volume hold the results and stay, unless `with_claim`; an FSx file system stays in any case. It is
    no error if something is gone already. Returns what was deleted; raises ApiError timeout if pods do not end.
    """
    selector = f"{naming.INSTANCE_LABEL}={name},{naming.MANAGED_BY_LABEL}=ridethrough"
    deleted: list[str] = []

    def remove(api_version: str, kind: str) -> None:
        where = Address(api_version, kind, namespace)
        try:
            found = api.list(where, selector)
        except ApiError as error:
            if error.kind == "not_found":  # the cluster has no such kind
                return
            if error.kind == "forbidden" and kind in _OPTIONAL_KINDS:
                say(f"{kind}: may not be listed; left alone")
                return
            raise
        for thing in found:
            claimed = (thing.get("spec") or {}).get("claimRef") or {}
            if kind == "PersistentVolume" and claimed.get("namespace") != namespace:
                continue
            if api.delete(where, thing["metadata"]["name"]):
                deleted.append(f"{kind}/{thing['metadata']['name']}")
                say(f"{deleted[-1]} deleted")

    for api_version, kind in (
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
        ("batch/v1", "Job"),
    ):
        remove(api_version, kind)
    _wait_for_no_pods(api, namespace, f"{naming.INSTANCE_LABEL}={name}", timeout_s)
    for api_version, kind in (
        ("v1", "Service"),
        ("policy/v1", "PodDisruptionBudget"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("resource.k8s.io/v1", "ResourceClaimTemplate"),
        ("monitoring.coreos.com/v1", "PodMonitor"),
        ("monitoring.coreos.com/v1", "PrometheusRule"),
        ("v1", "Secret"),
        ("v1", "ConfigMap"),
    ):
        remove(api_version, kind)
    if with_claim:
        remove("v1", "PersistentVolumeClaim")
        remove("v1", "PersistentVolume")
    return deleted


def _wait_for_no_pods(api: Api, namespace: str, selector: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    where = Address("v1", "Pod", namespace)
    while True:
        left = [pod["metadata"]["name"] for pod in api.list(where, selector)]
        if not left:
            return
        if time.monotonic() >= end:
            names = ", ".join(left[:3])
            message = f"pods do not end: {names}; is their node gone? kubectl delete pod --force frees them, "
            raise ApiError("timeout", message + "once you are sure that their processes are dead")
        api.sleep(_POLL_S)
