"""The job itself for each orchestrator: the same two pod templates in four envelopes.

| backend | objects | the coordinator's name |
|---|---|---|
| jobset | JobSet | NAME-coordinator-0-0.NAME |
| job | headless Service, two Indexed Jobs | NAME-coordinator-0.NAME |
| trainjob | TrainingRuntime, TrainJob | as jobset |
| hyperpod | Service, HyperPodPyTorchJob | NAME-coordinator |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridethrough.cluster import naming, objects, pods
from ridethrough.cluster.exit_rules import jobset_failure_policy, pod_failure_policy
from ridethrough.cluster.objects import Object
from ridethrough.cluster.spec import Backend, JobSpec

TRAINJOB_CONTAINER = "node"
"""The name that Kubeflow Trainer expects of the training container."""


def _job_spec(spec: JobSpec, num_pods: int, template: Object) -> Object:
    """Spec of an Indexed Job. A replacement is made only when the old pod has ended: two never write as one."""
    body: Object = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": spec.limits.pod_failures * num_pods,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": pod_failure_policy(template["spec"]["containers"][0]["name"]),
        "template": template,
    }
    if spec.limits.deadline_s is not None:
        body["activeDeadlineSeconds"] = spec.limits.deadline_s
    return body


def _queue(spec: JobSpec) -> dict[str, str]:
    return {naming.QUEUE_LABEL: spec.placement.queue} if spec.placement.queue else {}


def _jobset_spec(spec: JobSpec, training_pod: Object, trainer_labels: dict[str, str]) -> Object:
    coordinator: Object = {
        "name": naming.COORDINATOR,
        "replicas": 1,
        "template": {
            "metadata": {"labels": naming.labels(spec, naming.COORDINATOR)},
            "spec": _job_spec(spec, 1, pods.coordinator_pod(spec)),
        },
    }
    trainer: Object = {
        "name": naming.TRAINER if not trainer_labels else TRAINJOB_CONTAINER,
        "replicas": 1,
        "template": {
            "metadata": {"labels": naming.labels(spec, naming.TRAINER) | trainer_labels},
            "spec": _job_spec(spec, spec.num_pods, training_pod),
        },
    }
    return {
        "network": {"enableDNSHostnames": True, "subdomain": naming.service(spec), "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": naming.COORDINATOR, "jobIndex": 0, "podIndex": 0},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [trainer["name"]]},
        "failurePolicy": jobset_failure_policy(spec.limits.job_restarts),
        "replicatedJobs": [coordinator, trainer],
    }


def jobset(spec: JobSpec) -> list[Object]:
    """JobSet v1alpha2: it makes the headless Service, and tells a fatal end from one that is worth a new start."""
    metadata = objects.meta(spec, spec.name)
    metadata["labels"] |= _queue(spec)
    body = _jobset_spec(spec, pods.training_pod(spec, naming.endpoint(spec)), {})
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": body}]


def job(spec: JobSpec) -> list[Object]:
    """Nothing but Kubernetes: two Indexed Jobs behind a headless Service of ours."""
    out: list[Object] = [objects.headless_service(spec)]
    templates = (
        (naming.COORDINATOR, 1, pods.coordinator_pod(spec)),
        (naming.TRAINER, spec.num_pods, pods.training_pod(spec, naming.endpoint(spec))),
    )
    for component, num_pods, template in templates:
        template["spec"]["subdomain"] = naming.service(spec)
        metadata = objects.meta(spec, f"{spec.name}-{component}", component)
        if component == naming.TRAINER:
            metadata["labels"] |= _queue(spec)
        body = _job_spec(spec, num_pods, template)
        out.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body})
    return out


def trainjob(spec: JobSpec) -> list[Object]:
    """Kubeflow Trainer v1alpha1: a runtime of the job's own, with our JobSet in it, and a TrainJob that names it.

    No `mlPolicy.torch`: it would set torchrun's rendezvous variables, and the launcher has its own.
    """
    template = pods.training_pod(spec, naming.endpoint(spec))
    template["spec"]["containers"][0]["name"] = TRAINJOB_CONTAINER
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime: Object = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": objects.meta(spec, spec.name),
        "spec": {
            "mlPolicy": {"numNodes": spec.num_pods},
            "template": {"spec": _jobset_spec(spec, template, step)},
        },
    }
    metadata = objects.meta(spec, spec.name)
    metadata["labels"] |= _queue(spec)
    body: Object = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
        "trainer": {"numNodes": spec.num_pods},
    }
    train: Object = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": body,
    }
    return [runtime, train]


def hyperpod(spec: JobSpec) -> list[Object]:
    """SageMaker HyperPod's training operator. Its pods have no stable host names, so the coordinator has a Service."""
    service = objects.headless_service(spec)
    service["metadata"]["name"] = naming.coordinator_host(spec)
    service["spec"]["selector"] = naming.selector(spec, naming.COORDINATOR)
    metadata = objects.meta(spec, spec.name)
    metadata["labels"] |= _queue(spec)
    body: Object = {
        "nprocPerNode": str(spec.nproc_per_node),
        "replicaSpecs": [
            {"name": naming.COORDINATOR, "replicas": 1, "template": pods.coordinator_pod(spec)},
            {
                "name": naming.TRAINER,
                "replicas": spec.num_pods,
                "template": pods.training_pod(spec, naming.endpoint(spec)),
            },
        ],
        "runPolicy": {
            "cleanPodPolicy": "None",
            "jobMaxRetryCount": spec.limits.pod_failures * spec.num_pods,
            "restartPolicy": {
                "evalPeriodSeconds": 21600,
                "numRestartBeforeFullJobRestart": spec.limits.pod_failures,
                "maxFullJobRestarts": spec.limits.job_restarts,
            },
            "ttlSecondsAfterFinished": -1,
        },
    }
    if spec.limits.deadline_s is not None:
        body["runPolicy"]["activeDeadlineSeconds"] = spec.limits.deadline_s
    kind = {"apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob"}
    return [service, kind | {"metadata": metadata, "spec": body}]


BACKENDS: dict[Backend, Callable[[JobSpec], list[dict[str, Any]]]] = {
    "jobset": jobset,
    "job": job,
    "trainjob": trainjob,
    "hyperpod": hyperpod,
}
