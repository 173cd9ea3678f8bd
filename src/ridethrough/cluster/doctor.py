"""What a cluster offers to a job: version, kinds, GPUs, EFA, volumes, quota, our rights. Changes nothing.

Each line is PASS, FAIL or UNAVAILABLE (we may not look); a FAIL of something that the job at hand does not use is only
a note. `ok` is false if something fails that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ridethrough.cluster import naming
from ridethrough.cluster.api import Address, Api, ApiError
from ridethrough.cluster.objects import Object
from ridethrough.cluster.quantity import QuantityError, parse_quantity
from ridethrough.cluster.schemas import OLDEST
from ridethrough.cluster.spec import JobSpec

Verdict = Literal["PASS", "FAIL", "UNAVAILABLE"]

SHARED_PROVISIONERS = (
    "efs.csi.aws.com",
    "file.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "fsx.csi.aws.com",
    "lustre.csi.storage.gke.io",
    "nfs.csi.k8s.io",
    "cephfs.csi.ceph.com",
)
"""Provisioners, by the end of their names, whose volumes many nodes mount for writing."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `needed` by the job at hand, or by every job if there is none."""

    item: str
    verdict: Verdict
    detail: str
    needed: bool


def examine(api: Api, namespace: str, spec: JobSpec | None = None) -> list[Finding]:
    """All findings, for a job if one is given. Raises ApiError only if the cluster cannot be reached at all."""
    findings = [_version(api)]
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("kinds", lambda: _kinds(api, spec)),
        ("nodes", lambda: _nodes(api, spec)),
        ("volumes", lambda: _volumes(api, namespace, spec)),
        ("quota", lambda: _quota(api, namespace, spec)),
        ("rights", lambda: _rights(api, namespace, spec)),
    ]
    for name, check in checks:
        try:
            findings += check()
        except ApiError as error:
            if error.kind not in ("forbidden", "not_found"):
                raise
            findings.append(Finding(name, "UNAVAILABLE", str(error), needed=False))
    return findings


def ok(findings: list[Finding]) -> bool:
    return not any(finding.needed and finding.verdict == "FAIL" for finding in findings)


def _version(api: Api) -> Finding:
    said = api.request("GET", "/version")
    major, minor = int(said.get("major", 0)), int("".join(c for c in str(said.get("minor", "0")) if c.isdigit()) or 0)
    old = (major, minor) < tuple(int(part) for part in OLDEST.split("."))
    detail = f"Kubernetes {major}.{minor}" + (f"; Jobs as rendered need {OLDEST}" if old else "")
    return Finding("version", "FAIL" if old else "PASS", detail, needed=True)


def _kinds(api: Api, spec: JobSpec | None) -> list[Finding]:
    backend = spec.backend if spec else "jobset"
    monitoring = bool(spec and spec.options.monitoring)
    queue = bool(spec and spec.placement.queue)
    wanted = (
        ("JobSet", "/apis/jobset.x-k8s.io/v1alpha2", backend in ("jobset", "trainjob"), "install JobSet"),
        ("TrainJob", "/apis/trainer.kubeflow.org/v1alpha1", backend == "trainjob", "install Kubeflow Trainer 2"),
        ("HyperPodPyTorchJob", "/apis/sagemaker.amazonaws.com/v1", backend == "hyperpod", "the HyperPod add-on"),
        ("PodMonitor", "/apis/monitoring.coreos.com/v1", monitoring, "install the Prometheus operator"),
        ("LocalQueue", "/apis/kueue.x-k8s.io/v1beta1", queue, "install Kueue"),
    )
    findings = []
    for kind, path, needed, remedy in wanted:
        try:
            have = {entry.get("kind") for entry in api.request("GET", path).get("resources") or []}
        except ApiError as error:
            if error.kind != "not_found":
                raise
            have = set()
        there = kind in have
        detail = "there" if there else f"not there: {remedy}" + ("" if needed else " (not used)")
        findings.append(Finding(f"kind {kind}", "PASS" if there else "FAIL", detail, needed))
    return findings


def _nodes(api: Api, spec: JobSpec | None) -> list[Finding]:
    nodes = [node for node in api.list(Address("v1", "Node", "")) if _is_ready(node)]
    findings = [Finding("nodes", "PASS" if nodes else "FAIL", f"{len(nodes)} ready", needed=True)]
    resource = spec.resources.gpu_resource if spec else "nvidia.com/gpu"
    counts = (
        ("GPUs", resource, spec.resources.gpus if spec else 0),
        ("EFA", "vpc.amazonaws.com/efa", spec.resources.efa if spec and spec.resources.efa_from != "dra" else 0),
        ("huge pages", "hugepages-2Mi", int(parse_quantity((spec and spec.resources.hugepages_2mi) or "0"))),
    )
    for item, name, per_node in counts:
        have = [_amount(node, name) for node in nodes]
        some = [amount for amount in have if amount > 0]
        fitting = sum(amount >= per_node for amount in some) if per_node else len(some)
        needed = bool(spec and per_node)
        enough = fitting >= (spec.num_pods if spec else 1) if needed else bool(some)
        detail = f"{fitting} nodes" + (f" with {per_node:g} or more of {name}" if per_node else f" have {name}")
        if needed and not enough and spec:
            detail += f"; {spec.num_pods} are needed ({spec.nodes} and {spec.standby} standby): scale the node group"
        findings.append(Finding(item, "PASS" if enough else "FAIL", detail, needed))
    if spec and spec.placement.node_selector:
        picked = [node for node in nodes if _has(node, spec.placement.node_selector)]
        good = len(picked) >= spec.num_pods or (bool(picked) and spec.placement.spread != "required")
        detail = f"{len(picked)} nodes have the labels of placement.node_selector"
        findings.append(Finding("node labels", "PASS" if good else "FAIL", detail, needed=True))
    return findings


def _volumes(api: Api, namespace: str, spec: JobSpec | None) -> list[Finding]:
    if spec is not None and (spec.storage.claim or spec.storage.fsx):
        if spec.storage.fsx:
            drivers = api.request("GET", "/apis/storage.k8s.io/v1/csidrivers").get("items") or []
            there = any(driver["metadata"]["name"] == "fsx.csi.aws.com" for driver in drivers)
            detail = "fsx.csi.aws.com is there" if there else "install the add-on aws-fsx-csi-driver"
            return [Finding("volume driver", "PASS" if there else "FAIL", detail, needed=True)]
        claim = api.find(Address("v1", "PersistentVolumeClaim", namespace), naming.claim(spec))
        modes = ((claim or {}).get("spec") or {}).get("accessModes") or []
        good = claim is not None and (spec.storage.access in modes)
        detail = f"claim {spec.storage.claim}: " + (f"access {', '.join(modes)}" if claim else "not there")
        return [Finding("claim", "PASS" if good else "FAIL", detail, needed=True)]
    classes = api.list(Address("storage.k8s.io/v1", "StorageClass", ""))
    shared = [c["metadata"]["name"] for c in classes if str(c.get("provisioner", "")).endswith(SHARED_PROVISIONERS)]
    wanted = spec.storage.storage_class if spec else None
    if wanted:
        there = any(c["metadata"]["name"] == wanted for c in classes)
        detail = f"class {wanted} is {'there' if there else 'not there'}"
        if there and spec and spec.storage.access == "ReadWriteMany" and wanted not in shared:
            detail += "; its provisioner is not known for ReadWriteMany"
        return [Finding("storage class", "PASS" if there else "FAIL", detail, needed=True)]
    detail = f"classes for ReadWriteMany: {', '.join(shared) or 'none that is known'}"
    needed = bool(spec and spec.storage.access == "ReadWriteMany")
    return [Finding("storage class", "PASS" if shared else "FAIL", detail, needed)]


def _quota(api: Api, namespace: str, spec: JobSpec | None) -> list[Finding]:
    findings = []
    asked = _asked(spec) if spec else {}
    for quota in api.list(Address("v1", "ResourceQuota", namespace)):
        status = quota.get("status") or {}
        for name, hard in (status.get("hard") or {}).items():
            left = parse_quantity(hard) - parse_quantity((status.get("used") or {}).get(name, "0"))
            short = name in asked and asked[name] > left
            detail = f"{quota['metadata']['name']}: {name}: {float(left):g} of {hard} left"
            if short:
                detail += f", {asked[name]:g} are needed"
            findings.append(Finding("quota", "FAIL" if short else "PASS", detail, needed=name in asked))
    return findings or [Finding("quota", "PASS", "none", needed=False)]


def _asked(spec: JobSpec) -> dict[str, float]:
    pods = spec.num_pods
    out = {
        "pods": pods + 1.0,
        "requests.cpu": float(parse_quantity(spec.resources.cpu) * pods) + 0.5,
        "requests.memory": float(parse_quantity(spec.resources.memory) * pods) + (1 << 30),
    }
    if spec.resources.gpus:
        out[f"requests.{spec.resources.gpu_resource}"] = float(spec.resources.gpus * pods)
    return out


def _rights(api: Api, namespace: str, spec: JobSpec | None) -> list[Finding]:
    backend = spec.backend if spec else "jobset"
    needed = [
        ("", "pods", "list"),
        ("", "pods/log", "get"),
        ("", "configmaps", "create"),
        ("", "secrets", "create"),
        ("", "persistentvolumeclaims", "create"),
        ("networking.k8s.io", "networkpolicies", "create"),
        ("policy", "poddisruptionbudgets", "create"),
        *([("jobset.x-k8s.io", "jobsets", "create")] if backend == "jobset" else [("batch", "jobs", "create")]),
    ]
    if spec and spec.storage.fsx:
        needed.append(("", "persistentvolumes", "create"))
    wished = [("", "pods", "create"), ("", "pods/proxy", "get"), ("", "events", "list")]  # collect, warnings
    findings = []
    for (group, resource, verb), must in [*((r, True) for r in needed), *((r, False) for r in wished)]:
        allowed = _allowed(api, namespace, group, resource, verb)
        detail = f"{verb} {resource}" + (f".{group}" if group else "") + ("" if allowed else ": not allowed")
        findings.append(Finding("right", "PASS" if allowed else "FAIL", detail, must))
    return findings


def _allowed(api: Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    name, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {"name": ""},
        "spec": {"resourceAttributes": attributes},
    }
    path = Address("authorization.k8s.io/v1", "SelfSubjectAccessReview", namespace).path()
    answer = api.request("POST", path, body=review)
    return bool((answer.get("status") or {}).get("allowed"))


def _is_ready(node: Object) -> bool:
    conditions = {c["type"]: c["status"] for c in (node.get("status") or {}).get("conditions") or []}
    return conditions.get("Ready") == "True" and not (node.get("spec") or {}).get("unschedulable")


def _amount(node: Object, resource: str) -> float:
    try:
        return float(parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0")))
    except QuantityError:
        return 0.0


def _has(node: Object, wanted: dict[str, str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in wanted.items())
