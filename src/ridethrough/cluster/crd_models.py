"""Strict models of the custom resources that are rendered: any field, value or name that their CRDs lack is an error.

Written from the published Go types (JobSet v1alpha2, Kubeflow Trainer v1alpha1) and the operator's schema (HyperPod),
with their CEL and webhook rules. Pod and Job templates inside are checked against Kubernetes' own schemas elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[int, Field(ge=1, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(_Strict):
    name: str | None = None
    namespace: DnsLabel | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ObjectMetadata(Metadata):
    name: DnsLabel


# --- JobSet v1alpha2 -------------------------------------------------------------------------------------------------


class Network(_Strict):
    enableDNSHostnames: bool = False
    subdomain: DnsLabel | None = None
    publishNotReadyAddresses: bool = True


class Coordinator(_Strict):
    replicatedJob: str
    jobIndex: Count = 0
    podIndex: Count = 0


class SuccessPolicy(_Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str] = []


JobFailureReason = Literal[
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
]


class FailureRule(_Strict):
    name: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    onJobFailureReasons: list[JobFailureReason] = []
    onJobFailureMessagePatterns: list[str] = []
    targetReplicatedJobs: list[str] = []


class FailurePolicy(_Strict):
    maxRestarts: Count = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate"] = "Recreate"
    rules: list[FailureRule] = []


class DependsOn(_Strict):
    name: str
    status: Literal["Ready", "Complete"]


class JobTemplate(_Strict):
    metadata: Metadata = Metadata()
    spec: dict[str, Any]


class ReplicatedJob(_Strict):
    name: DnsLabel
    groupName: str = "default"
    replicas: Positive = 1
    template: JobTemplate
    dependsOn: list[DependsOn] = Field([], max_length=1)


class JobSetSpec(_Strict):
    replicatedJobs: list[ReplicatedJob] = Field(min_length=1)
    network: Network | None = None
    successPolicy: SuccessPolicy | None = None
    failurePolicy: FailurePolicy | None = None
    suspend: bool | None = None
    coordinator: Coordinator | None = None
    managedBy: str | None = None
    ttlSecondsAfterFinished: Count | None = None

    @model_validator(mode="after")
    def _references(self) -> JobSetSpec:
        names = [job.name for job in self.replicatedJobs]
        if len(set(names)) != len(names):
            raise ValueError("replicatedJobs: a name stands twice")
        targets = list(self.successPolicy.targetReplicatedJobs) if self.successPolicy else []
        rules = self.failurePolicy.rules if self.failurePolicy else []
        targets += [target for rule in rules for target in rule.targetReplicatedJobs]
        if self.coordinator is not None:
            targets.append(self.coordinator.replicatedJob)
        for position, job in enumerate(self.replicatedJobs):
            targets += [d.name for d in job.dependsOn]
            if any(d.name not in names[:position] for d in job.dependsOn):
                raise ValueError(f"replicatedJobs.{job.name}: depends on a job that does not stand before it")
        unknown = sorted(set(targets) - set(names))
        if unknown:
            raise ValueError(f"no replicated job is called {', '.join(unknown)}")
        rule_names = [rule.name for rule in rules]
        if len(set(rule_names)) != len(rule_names):
            raise ValueError("failurePolicy.rules: a name stands twice")
        return self


class JobSet(_Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: ObjectMetadata
    spec: JobSetSpec


# --- Kubeflow Trainer v1alpha1 ---------------------------------------------------------------------------------------


class TorchPolicy(_Strict):
    numProcPerNode: int | Literal["auto", "cpu", "gpu"] = "auto"


class MlPolicy(_Strict):
    numNodes: Positive | None = None
    torch: TorchPolicy | None = None


class JobSetTemplate(_Strict):
    metadata: Metadata = Metadata()
    spec: JobSetSpec


class TrainingRuntimeSpec(_Strict):
    mlPolicy: MlPolicy | None = None
    podGroupPolicy: dict[str, Any] | None = None
    template: JobSetTemplate

    @model_validator(mode="after")
    def _steps(self) -> TrainingRuntimeSpec:
        for job in self.template.spec.replicatedJobs:
            step = job.template.metadata.labels.get("trainer.kubeflow.org/trainjob-ancestor-step")
            if job.replicas != 1:
                raise ValueError(f"replicatedJobs.{job.name}: the trainer allows one replica")
            if step == "trainer":
                containers = job.template.spec["template"]["spec"]["containers"]
                if not any(container.get("name") == "node" for container in containers):
                    raise ValueError(f"replicatedJobs.{job.name}: the training container must be called node")
        return self


class TrainingRuntime(_Strict):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainingRuntime"]
    metadata: ObjectMetadata
    spec: TrainingRuntimeSpec


class RuntimeRef(_Strict):
    name: str = Field(min_length=1, max_length=253)
    apiGroup: Literal["trainer.kubeflow.org"] = "trainer.kubeflow.org"
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"


class EnvVar(_Strict):
    name: str
    value: str | None = None
    valueFrom: dict[str, Any] | None = None


class Trainer(_Strict):
    image: str | None = Field(None, max_length=500)
    command: list[str] | None = Field(None, max_length=128)
    args: list[str] | None = Field(None, max_length=128)
    env: list[EnvVar] | None = Field(None, max_length=128)
    numNodes: Positive | None = None
    resourcesPerNode: dict[str, Any] | None = None
    numProcPerNode: Positive | None = None


class TrainJobSpec(_Strict):
    runtimeRef: RuntimeRef
    trainer: Trainer | None = None
    suspend: bool | None = None
    activeDeadlineSeconds: Positive | None = None
    managedBy: Literal["trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"] | None = None


class TrainJobMetadata(Metadata):
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)


class TrainJob(_Strict):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: TrainJobMetadata
    spec: TrainJobSpec


# --- SageMaker HyperPod ----------------------------------------------------------------------------------------------


class ReplicaSpec(_Strict):
    name: DnsLabel
    replicas: Count = 1
    spares: Count = 0
    template: dict[str, Any]


class HyperPodRestartPolicy(_Strict):
    evalPeriodSeconds: Positive
    maxFullJobRestarts: Count | None = None
    numRestartBeforeFullJobRestart: Count | None = None


class LogRule(_Strict):
    name: str
    logPattern: str
    expectedRecurringFrequencyInSeconds: Positive | None = None
    expectedStartCutOffInSeconds: Positive | None = None
    metricEvaluationDataPoints: Positive | None = None
    metricThreshold: int | None = None
    operator: Literal["gt", "lt", "eq", "gteq", "lteq"] | None = None
    stopPattern: str | None = None


class RunPolicy(_Strict):
    activeDeadlineSeconds: Positive | None = None
    cleanPodPolicy: Literal["All", "OnlyComplete", "None"] = "All"
    faultDeadlineSeconds: Positive | None = None
    jobMaxRetryCount: Count | None = None
    logMonitoringConfiguration: list[LogRule] = []
    restartPolicy: HyperPodRestartPolicy | None = None
    startupDeadlineSeconds: Positive | None = None
    suspend: bool | None = None
    ttlSecondsAfterFinished: int = 0


class HyperPodSpec(_Strict):
    nprocPerNode: str = Field("auto", pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")
    replicaSpecs: list[ReplicaSpec] = Field(min_length=1)
    runPolicy: RunPolicy | None = None


class HyperPodPyTorchJob(_Strict):
    apiVersion: Literal["sagemaker.amazonaws.com/v1"]
    kind: Literal["HyperPodPyTorchJob"]
    metadata: ObjectMetadata
    spec: HyperPodSpec


# --- Prometheus operator ---------------------------------------------------------------------------------------------


class Selector(_Strict):
    matchLabels: dict[str, str] = {}


class SecretKey(_Strict):
    name: str
    key: str


class Authorization(_Strict):
    type: Literal["Bearer"] = "Bearer"
    credentials: SecretKey


class PodMetricsEndpoint(_Strict):
    port: str
    authorization: Authorization | None = None
    path: str = "/metrics"
    interval: str | None = Field(None, pattern=r"^([0-9]+(ms|s|m|h))+$")
    honorLabels: bool = False


class PodMonitorSpec(_Strict):
    selector: Selector
    podMetricsEndpoints: list[PodMetricsEndpoint] = Field(min_length=1)
    podTargetLabels: list[str] = []


class PodMonitor(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: ObjectMetadata
    spec: PodMonitorSpec


class AlertRule(_Strict):
    alert: str | None = None
    record: str | None = None
    expr: str
    for_: str | None = Field(None, alias="for", pattern=r"^([0-9]+(ms|s|m|h|d))+$")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class AlertGroup(_Strict):
    name: str
    interval: str | None = None
    rules: list[AlertRule]


class PrometheusRuleSpec(_Strict):
    groups: list[AlertGroup] = Field(min_length=1)


class PrometheusRule(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: ObjectMetadata
    spec: PrometheusRuleSpec


MODELS: dict[tuple[str, str], type[BaseModel]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): TrainingRuntime,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TrainJob,
    ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"): HyperPodPyTorchJob,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
}
"""(apiVersion, kind) -> model."""
