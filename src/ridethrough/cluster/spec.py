"""One typed model of a job on a cluster. Everything that is rendered follows from it and from its profile.

Sizes are Kubernetes quantities ("64Gi"), times seconds, `*_gb` decimal gigabytes (1e9 bytes).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ridethrough.cluster.quantity import parse_quantity
from ridethrough.generation.policy import Policy

Backend = Literal["jobset", "job", "trainjob", "hyperpod"]


class SpecError(ValueError):
    """The file cannot be used. The message has one line for each thing that is wrong, with its place and the remedy."""


def _quantity(value: str) -> str:
    if parse_quantity(value) < 0:
        raise ValueError(f"{value!r} is negative")
    return value


Quantity = Annotated[str, AfterValidator(_quantity)]
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
"""RFC 1035 label; 40, since the controllers put "-coordinator-0-0-" and five characters behind it, 63 at most."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Resources(_Part):
    """Of one training pod, which is one node's part of the job. Requests equal limits."""

    cpu: Quantity
    memory: Quantity = Field(description="Limit of the pod. Snapshots (memfd) and /dev/shm count against it.")
    gpus: int = Field(0, ge=0)
    gpu_resource: str = "nvidia.com/gpu"
    efa: int = Field(0, ge=0, description="EFA interfaces.")
    efa_from: Literal["device-plugin", "dra"] = Field(
        "device-plugin", description="dra: a ResourceClaimTemplate, Kubernetes 1.34 and the EFA DRA driver."
    )
    hugepages_2mi: Quantity | None = None
    shm: Quantity = Field("1Gi", description="Memory-backed /dev/shm; the default of containers is 64 MiB.")
    scratch: Quantity = Field("20Gi", description="Disk-backed /tmp for compile caches.")


class Fsx(_Part):
    """An FSx for Lustre file system that exists: bound statically, kept when the claim goes."""

    file_system_id: str = Field(pattern=r"^fs-[0-9a-f]{8,}$")
    dns_name: str
    mount_name: str
    size: Quantity = "1200Gi"


class Storage(_Part):
    """The shared volume: checkpoints, runs, data. One of `claim`, `fsx` and `storage_class`."""

    claim: str | None = Field(None, description="Name of a PersistentVolumeClaim that exists.")
    fsx: Fsx | None = None
    storage_class: str | None = Field(None, description='Class of a new claim; "" is the cluster\'s default.')
    size: Quantity = "1200Gi"
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    mount: str = Field("/shared", pattern=r"^/[a-z0-9/_-]+$")
    write_gb_s: float = Field(gt=0, description="Throughput of all nodes' writes together, GB/s: gives the grace.")

    @model_validator(mode="after")
    def _one(self) -> Storage:
        if sum(value is not None for value in (self.claim, self.fsx, self.storage_class)) != 1:
            raise ValueError("give exactly one of claim, fsx and storage_class")
        return self


class State(_Part):
    """What is protected; decides memory and grace."""

    total_gb: float = Field(gt=0, description="Model and optimizer of the whole job: parameters x 12 bytes for AdamW.")
    rank_host_gb: float = Field(3.0, gt=0, description="Host memory of one rank without snapshots.")
    step_s: float = Field(1.0, gt=0, description="Longest step: a stop waits for its end.")


class Limits(_Part):
    """Budgets and times, inner to outer. What is left out is computed; `validate` checks that they nest."""

    max_restarts: int = Field(100, ge=0, description="The launcher's own restarts.")
    pod_failures: int = Field(10, ge=0, description="Failed pods per node that Kubernetes replaces.")
    job_restarts: int = Field(3, ge=0, description="Starts of the whole job after that.")
    lease_s: float = Field(5.0, gt=0, description="A silent node is lost.")
    node_wait_s: float = Field(900.0, gt=0, description="Wait for a lost node's replacement.")
    unreachable_s: int = Field(30, ge=0, description="A pod on a node that went silent is given up.")
    stop_grace_s: float | None = Field(None, gt=0, description="From SIGTERM to the end of the last save.")
    pod_grace_s: int | None = Field(None, gt=0, description="terminationGracePeriodSeconds.")
    deadline_s: int | None = Field(None, gt=0, description="Longest time of the whole job.")


class Placement(_Part):
    node_selector: dict[str, str] = Field(default_factory=dict)
    coordinator_node_selector: dict[str, str] = Field(default_factory=dict)
    tolerate: list[str] = Field(default_factory=list, description="Keys of NoSchedule taints of the training nodes.")
    spread: Literal["required", "preferred", "none"] = Field("required", description="One training pod per node.")
    near: str | None = Field(None, description="Label of nodes that should be the same for all (rack, network spine).")
    priority_class: str | None = None
    priority: int | None = Field(None, description="Makes the PriorityClass with this value.")
    queue: str | None = Field(None, description="Kueue's LocalQueue.")

    @model_validator(mode="after")
    def _class(self) -> Placement:
        if self.priority is not None and self.priority_class is None:
            raise ValueError("priority needs priority_class, the name of the class to make")
        return self


class Faults(_Part):
    """Faults on purpose: the same as `ridethrough faults plan` with these options."""

    count: int = Field(5, ge=1)
    seed: int = 42
    types: list[str] = Field(default_factory=lambda: ["exception", "hang", "sigkill"], min_length=1)
    weights: list[float] | None = None
    steps: int = Field(2000, ge=2)


class DataPreparation(_Part):
    """A Job on CPU that makes the data before training starts; done again only if its output is missing."""

    args: list[str] = Field(min_length=1, description="Of `ridethrough data prepare`.")
    cpu: Quantity = "4"
    memory: Quantity = "16Gi"


class Options(_Part):
    network_policy: bool = True
    disruption_budget: bool = Field(True, description="Made where a standby node can take over.")
    monitoring: bool = Field(False, description="PodMonitor, alerts and dashboard; needs the Prometheus operator.")
    monitoring_namespace: Name = Field("monitoring", description="Where Prometheus is: it may reach the metrics.")
    hugging_face_secret: str | None = Field(None, description="Secret with the key HF_TOKEN.")
    image_pull_secret: str | None = None


class JobSpec(_Part):
    """A job. `ridethrough k8s init` writes one with comments."""

    name: Name
    namespace: Name = "default"
    profile: str
    backend: Backend = "jobset"
    image: str = Field(min_length=1)
    nodes: int = Field(ge=1)
    standby: int = Field(0, ge=0, description="Further nodes whose pods wait, warm, for a lost one's place.")
    min_nodes: int | None = Field(None, ge=1, description="May shrink to so many; default: never.")
    nproc_per_node: int = Field(ge=1)
    script: list[str] = Field(min_length=1, description="[script.py, ARGS...] or [-m, module, ARGS...].")
    env: dict[str, str] = Field(default_factory=dict)
    port: int = Field(29400, ge=1024, le=65535, description="The coordinator's.")
    uid: int = Field(1000, ge=1, description="User and group of all processes; owns the shared volume.")
    resources: Resources
    storage: Storage
    state: State
    limits: Limits = Limits()
    policy: dict[str, Any] = Field(
        default_factory=dict, description="What else decides about recovery: settings of docs/policy.md."
    )
    placement: Placement = Placement()
    faults: Faults | None = None
    data: DataPreparation | None = None
    options: Options = Options()

    @model_validator(mode="after")
    def _world(self) -> JobSpec:
        if self.resources.gpus and self.nproc_per_node > self.resources.gpus:
            raise ValueError(
                f"nproc_per_node {self.nproc_per_node} is more than resources.gpus {self.resources.gpus}: "
                "one rank has one GPU"
            )
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        return self

    @model_validator(mode="after")
    def _policy(self) -> JobSpec:
        if elsewhere := sorted(self.policy.keys() & Limits.model_fields.keys()):
            raise ValueError(f"policy: {', '.join(elsewhere)} stands under limits")
        try:
            Policy(**self.policy)
        except ValidationError as error:
            found = [f"policy.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ValueError(f"{'; '.join(found)} (docs/policy.md)") from None
        return self

    @property
    def num_pods(self) -> int:
        """Training pods: nodes that train and nodes that wait."""
        return self.nodes + self.standby

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node
