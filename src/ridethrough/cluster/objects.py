"""The objects around the job, the same for every backend: config, token, volume, network policy, budget, priority."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ridethrough.cluster import commands, monitoring, naming, pods
from ridethrough.cluster.exit_rules import pod_failure_policy
from ridethrough.cluster.reading import import_yaml
from ridethrough.cluster.spec import JobSpec
from ridethrough.faults.schedule import Schedule, plan

Object = dict[str, Any]


def meta(spec: JobSpec, name: str, component: str | None = None, *, namespaced: bool = True) -> Object:
    out: Object = {"name": name}
    if namespaced:
        out["namespace"] = spec.namespace
    return out | {"labels": naming.labels(spec, component)}


def spec_hash(spec: JobSpec) -> str:
    """First 16 hex digits of the SHA-256 of the spec's canonical JSON."""
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def schedule(spec: JobSpec) -> Schedule | None:
    """The faults of `spec.faults`. Raises ScheduleError, one line with the remedy."""
    if spec.faults is None:
        return None
    faults = spec.faults
    return plan(faults.seed, faults.count, faults.types, faults.weights, faults.steps, spec.world_size)


def config_map(spec: JobSpec) -> Object:
    """The resolved spec, which says afterwards what ran, the policy and the fault schedule."""
    data = {"job.yaml": import_yaml().safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False)}
    if spec.policy:
        data["policy.json"] = json.dumps(spec.policy, indent=1) + "\n"
    faults = schedule(spec)
    if faults is not None:
        data["faults.json"] = json.dumps(faults.as_json(), indent=1) + "\n"
    metadata = meta(spec, naming.config_map(spec)) | {"annotations": {naming.SPEC_HASH: spec_hash(spec)}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def token_secret(spec: JobSpec, token: str) -> Object:
    """What agents prove to know, and what Prometheus does; `submit` draws a new one for each job, `render` has none."""
    data = {"token": token}
    if spec.options.monitoring:  # of its own: who reads metrics need not be able to join the job
        data["metrics"] = hashlib.sha256(f"metrics {token}".encode()).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta(spec, naming.token_secret(spec)),
        "type": "Opaque",
        "immutable": True,
        "stringData": data,
    }


def volumes(spec: JobSpec) -> list[Object]:
    """The claim, and for FSx its volume: static, so that deleting job and claim deletes no data."""
    storage = spec.storage
    if storage.claim is not None:
        return []
    size = storage.fsx.size if storage.fsx else storage.size
    body: Object = {"accessModes": [storage.access], "resources": {"requests": {"storage": size}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta(spec, naming.claim(spec)),
        "spec": body,
    }
    if storage.fsx is None:
        if storage.storage_class:
            body["storageClassName"] = storage.storage_class
        return [claim]
    body |= {"storageClassName": "", "volumeName": naming.volume(spec)}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": meta(spec, naming.volume(spec), namespaced=False),
        "spec": {
            "capacity": {"storage": size},
            "volumeMode": "Filesystem",
            "accessModes": [storage.access],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "mountOptions": ["flock"],
            "claimRef": {"namespace": spec.namespace, "name": naming.claim(spec)},
            "csi": {
                "driver": "fsx.csi.aws.com",
                "volumeHandle": storage.fsx.file_system_id,
                "volumeAttributes": {"dnsname": storage.fsx.dns_name, "mountname": storage.fsx.mount_name},
            },
        },
    }
    return [volume, claim]


def headless_service(spec: JobSpec) -> Object:
    """Names for pods that are not ready yet: the launcher must find the coordinator before anything is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(spec, naming.service(spec)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": naming.selector(spec),
            "ports": [{"name": "coordinator", "port": spec.port, "targetPort": spec.port}],
        },
    }


def network_policy(spec: JobSpec) -> Object:
    """Ranks, keepers and agents of the job talk to each other on any port; nobody else to them."""
    ingress: list[Object] = [{"from": [{"podSelector": {"matchLabels": naming.selector(spec)}}]}]
    if spec.options.monitoring:
        place = {"kubernetes.io/metadata.name": spec.options.monitoring_namespace}
        ports = [{"protocol": "TCP", "port": commands.METRICS_PORT}]
        ingress.append({"from": [{"namespaceSelector": {"matchLabels": place}}], "ports": ports})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(spec, spec.name),
        "spec": {
            "podSelector": {"matchLabels": naming.selector(spec)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def disruption_budget(spec: JobSpec) -> Object:
    """At most as many nodes are drained at once as stand by. (Pods of Jobs allow only an absolute minAvailable.)"""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(spec, f"{spec.name}-{naming.TRAINER}"),
        "spec": {
            "minAvailable": spec.nodes,
            "selector": {"matchLabels": naming.selector(spec, naming.TRAINER)},
        },
    }


def priority_class(spec: JobSpec) -> Object:
    assert spec.placement.priority_class is not None
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": spec.placement.priority_class, "labels": naming.labels(spec)},
        "value": spec.placement.priority,
        "globalDefault": False,
        "description": "Training under ridethrough.",
    }


def efa_claim_template(spec: JobSpec) -> Object:
    """EFA through dynamic resource allocation (Kubernetes 1.34, the driver's device class)."""
    request = {"deviceClassName": "efa.networking.k8s.aws", "allocationMode": "ExactCount", "count": spec.resources.efa}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": meta(spec, naming.efa_template(spec)),
        "spec": {"spec": {"devices": {"requests": [{"name": "efa", "exactly": request}]}}},
    }


def data_job(spec: JobSpec) -> Object:
    """Makes the data on CPU, before the GPUs are asked for; `submit` waits for its end."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta(spec, f"{spec.name}-{naming.DATA}", naming.DATA),
        "spec": {
            "backoffLimit": 3,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": pod_failure_policy(naming.CONTAINER),
            "template": pods.data_pod(spec),
        },
    }


def before_the_job(spec: JobSpec, token: str | None) -> list[Object]:
    """Everything that must be there before pods start, in the order of creation. Without `token` no Secret."""
    out: list[Object] = []
    if spec.placement.priority is not None:
        out.append(priority_class(spec))
    out += volumes(spec)
    out.append(config_map(spec))
    if token is not None:
        out.append(token_secret(spec, token))
    if spec.options.network_policy:
        out.append(network_policy(spec))
    if spec.options.disruption_budget and spec.standby:
        out.append(disruption_budget(spec))
    if spec.resources.efa and spec.resources.efa_from == "dra":
        out.append(efa_claim_template(spec))
    if spec.options.monitoring:
        out.append(monitoring.pod_monitor(spec))
    if spec.data is not None:
        out.append(data_job(spec))
    return out
