"""Pod templates: the coordinator's, the training pods', the data preparation's.

All processes run as an ordinary user without further rights, on a read-only root; what must be written goes to /tmp
(disk), /dev/shm (memory) and the shared volume. Snapshots live in memfds: they need no mount, but count as the pod's
memory, which `sizing.pod_memory_bytes` adds up.
"""

from __future__ import annotations

from typing import Any

from ridethrough.cluster import commands, naming, sizing
from ridethrough.cluster.spec import JobSpec

DATA_GRACE_S = 30


def coordinator_pod(spec: JobSpec) -> dict[str, Any]:
    """Small, on a CPU node, so that it shares the fate of no training node. Its state is soft: it may start again."""
    container = _container(spec, commands.coordinator(spec), {"cpu": "500m", "memory": "1Gi"})
    container["ports"] = [{"name": "coordinator", "containerPort": spec.port}]
    container["readinessProbe"] = {"tcpSocket": {"port": "coordinator"}, "periodSeconds": 5}
    container["volumeMounts"] += [_TOKEN_MOUNT, _CONFIG_MOUNT]
    # It sees a planned stop to its end, so it may take as long as the agents do.
    pod = _pod(spec, naming.COORDINATOR, container, sizing.pod_grace_s(spec))
    if spec.placement.coordinator_node_selector:
        pod["spec"]["nodeSelector"] = dict(spec.placement.coordinator_node_selector)
    pod["spec"]["volumes"] += [_token_volume(spec), _config_volume(spec)]
    if spec.options.monitoring:
        pod["spec"]["initContainers"] = [_metrics_container(spec)]
    return pod


def _metrics_container(spec: JobSpec) -> dict[str, Any]:
    """A sidecar as Kubernetes means it (an init container that restarts always): it never keeps the Job from ending,
    and its end is no failure of the pod."""
    container = _container(spec, commands.metrics(spec), {"cpu": "200m", "memory": "1Gi"})
    container |= {"name": "metrics", "restartPolicy": "Always"}
    container["ports"] = [{"name": "metrics", "containerPort": commands.METRICS_PORT}]
    container["volumeMounts"].append(_TOKEN_MOUNT)
    return container


def training_pod(spec: JobSpec, endpoint: str) -> dict[str, Any]:
    """One node's agent and ranks. Which ranks is the coordinator's decision, so all training pods are alike."""
    resources = spec.resources
    limits: dict[str, str] = {"cpu": resources.cpu, "memory": resources.memory}
    if resources.gpus:
        limits[resources.gpu_resource] = str(resources.gpus)
    if resources.efa and resources.efa_from == "device-plugin":
        limits["vpc.amazonaws.com/efa"] = str(resources.efa)
    if resources.hugepages_2mi:
        limits["hugepages-2Mi"] = resources.hugepages_2mi
    container = _container(spec, commands.agent(spec, endpoint), limits)
    container["env"] += [{"name": name, "value": value} for name, value in sorted(spec.env.items())]
    if spec.options.hugging_face_secret:
        reference = {"name": spec.options.hugging_face_secret, "key": "HF_TOKEN"}
        container["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    container["volumeMounts"] += [_TOKEN_MOUNT, _CONFIG_MOUNT, {"name": "shm", "mountPath": "/dev/shm"}]
    pod = _pod(spec, naming.TRAINER, container, sizing.pod_grace_s(spec))
    body = pod["spec"]
    body["volumes"] += [
        _token_volume(spec),
        _config_volume(spec),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": resources.shm}},
    ]
    if resources.hugepages_2mi:
        container["volumeMounts"].append({"name": "hugepages", "mountPath": "/dev/hugepages"})
        body["volumes"].append({"name": "hugepages", "emptyDir": {"medium": "HugePages-2Mi"}})
    if resources.efa and resources.efa_from == "dra":
        container["resources"]["claims"] = [{"name": "efa"}]
        body["resourceClaims"] = [{"name": "efa", "resourceClaimTemplateName": naming.efa_template(spec)}]
    if spec.placement.node_selector:
        body["nodeSelector"] = dict(spec.placement.node_selector)
    body["tolerations"] = [*_tolerations(spec), *_given_up_after(spec.limits.unreachable_s)]
    affinity = _affinity(spec)
    if affinity:
        body["affinity"] = affinity
    return pod


def data_pod(spec: JobSpec) -> dict[str, Any]:
    """Tokenises on a CPU node, straight into the shared volume."""
    assert spec.data is not None
    container = _container(spec, commands.prepare(spec), {"cpu": spec.data.cpu, "memory": spec.data.memory})
    if spec.options.hugging_face_secret:
        reference = {"name": spec.options.hugging_face_secret, "key": "HF_TOKEN"}
        container["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    pod = _pod(spec, naming.DATA, container, DATA_GRACE_S)
    if spec.placement.coordinator_node_selector:
        pod["spec"]["nodeSelector"] = dict(spec.placement.coordinator_node_selector)
    return pod


_TOKEN_MOUNT = {"name": "token", "mountPath": commands.TOKEN_FOLDER, "readOnly": True}
_CONFIG_MOUNT = {"name": "job", "mountPath": commands.CONFIG_FOLDER, "readOnly": True}


def _token_volume(spec: JobSpec) -> dict[str, Any]:
    secret = {"secretName": naming.token_secret(spec), "defaultMode": 0o440}
    return {"name": "token", "secret": secret}


def _config_volume(spec: JobSpec) -> dict[str, Any]:
    return {"name": "job", "configMap": {"name": naming.config_map(spec)}}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _container(spec: JobSpec, command: list[str], resources: dict[str, str]) -> dict[str, Any]:
    return {
        "name": naming.CONTAINER,
        "image": spec.image,
        "command": command,
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "HF_HOME", "value": f"{spec.storage.mount}/huggingface"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            _field("NODE_NAME", "spec.nodeName"),
        ],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last words of a pod without a message of its own are the end of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "shared", "mountPath": spec.storage.mount},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _pod(spec: JobSpec, component: str, container: dict[str, Any], grace_s: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": spec.uid,
            "runAsGroup": spec.uid,
            "fsGroup": spec.uid,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": naming.claim(spec)}},
            {"name": "tmp", "emptyDir": {"sizeLimit": spec.resources.scratch}},
        ],
    }
    if spec.placement.priority_class:
        body["priorityClassName"] = spec.placement.priority_class
    if spec.options.image_pull_secret:
        body["imagePullSecrets"] = [{"name": spec.options.image_pull_secret}]
    return {"metadata": {"labels": naming.labels(spec, component)}, "spec": body}


def _tolerations(spec: JobSpec) -> list[dict[str, Any]]:
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in spec.placement.tolerate]


def _given_up_after(seconds: int) -> list[dict[str, Any]]:
    """Kubernetes waits 300 s before it gives up a pod on a silent node; the job has moved on long before."""
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return [{"key": k, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds} for k in keys]


def _affinity(spec: JobSpec) -> dict[str, Any]:
    match = {"labelSelector": {"matchLabels": naming.selector(spec, naming.TRAINER)}}
    host = match | {"topologyKey": "kubernetes.io/hostname"}
    affinity: dict[str, Any] = {}
    if spec.placement.spread == "required":
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [host]}
    elif spec.placement.spread == "preferred":
        weighted = [{"weight": 100, "podAffinityTerm": host}]
        affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": weighted}
    if spec.placement.near:
        near = [{"weight": 100, "podAffinityTerm": match | {"topologyKey": spec.placement.near}}]
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": near}
    return affinity
