"""The pods inside rendered objects, whatever envelope they are in: for the checks and the pod lab."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ridethrough.cluster.objects import Object
from ridethrough.cluster.schemas import identity


@dataclass(frozen=True)
class Workload:
    """Pods of one template. `job` is the Job's spec, None where the envelope makes pods itself.

    `base` is what the names of its pods start with; an index is put behind it.
    """

    where: str
    base: str
    namespace: str
    labels: dict[str, str]
    pod: dict[str, Any]
    job: dict[str, Any] | None
    num_pods: int
    subdomain: str | None

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [c for key in ("initContainers", "containers") for c in self.pod.get(key) or []]

    @property
    def command(self) -> list[str]:
        """Command and arguments of the main container."""
        main = self.pod["containers"][0]
        return [*(main.get("command") or []), *(main.get("args") or [])]

    def host_names(self) -> list[str]:
        """Names of the pods in DNS, as other pods of the namespace write them; empty where there are none."""
        if not self.subdomain:
            return []
        return [f"{self.base}-{index}.{self.subdomain}" for index in range(self.num_pods)]

    def option(self, flag: str) -> str | None:
        """Value of `--flag VALUE` in the main container's command."""
        command = self.command
        return command[command.index(flag) + 1] if flag in command[:-1] else None


def workloads(rendered: list[Object]) -> list[Workload]:
    """All pod templates in the order of the objects. Objects of an unknown kind have none."""
    return [workload for thing in rendered for workload in _of(thing)]


def _of(thing: Object) -> Iterator[Workload]:
    kind, spec, name = thing.get("kind"), thing.get("spec") or {}, str(thing.get("metadata", {}).get("name"))
    namespace = thing.get("metadata", {}).get("namespace", "default")
    if kind == "Job":
        yield _job(identity(thing), name, namespace, spec, None)
    elif kind == "TrainingRuntime":
        yield from _jobset(identity(thing), name, namespace, spec["template"]["spec"])
    elif kind == "JobSet":
        yield from _jobset(identity(thing), name, namespace, spec)
    elif kind == "HyperPodPyTorchJob":
        for entry in spec["replicaSpecs"]:
            template = entry["template"]
            yield Workload(
                where=f"{identity(thing)} {entry['name']}",
                base=f"{name}-{entry['name']}",
                namespace=namespace,
                labels=(template.get("metadata") or {}).get("labels") or {},
                pod=template["spec"],
                job=None,
                num_pods=entry.get("replicas", 1),
                subdomain=None,
            )


def _jobset(where: str, name: str, namespace: str, spec: dict[str, Any]) -> Iterator[Workload]:
    network = spec.get("network") or {}
    subdomain = (network.get("subdomain") or name) if network.get("enableDNSHostnames") else None
    for entry in spec["replicatedJobs"]:
        for index in range(entry.get("replicas", 1)):
            base = f"{name}-{entry['name']}-{index}"
            yield _job(f"{where} {entry['name']}", base, namespace, entry["template"]["spec"], subdomain)


def _job(where: str, base: str, namespace: str, spec: dict[str, Any], subdomain: str | None) -> Workload:
    template = spec["template"]
    return Workload(
        where=where,
        base=base,
        namespace=namespace,
        labels=(template.get("metadata") or {}).get("labels") or {},
        pod=template["spec"],
        job=spec,
        num_pods=spec.get("completions") or spec.get("parallelism") or 1,
        subdomain=subdomain or template["spec"].get("subdomain"),
    )
