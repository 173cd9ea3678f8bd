"""What schemas cannot see in a pod: dangling names, quantities that cannot be met, rights, memory, the time to stop."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from ridethrough.cluster.objects import Object
from ridethrough.cluster.quantity import QuantityError, parse_quantity
from ridethrough.cluster.schemas import Problem, identity
from ridethrough.cluster.sizing import AGENT_S
from ridethrough.cluster.workloads import Workload

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_CREDENTIAL = re.compile(r"(token|secret|password|credential|access_key)", re.IGNORECASE)
_SUFFIX = 6
"""A Job puts "-" and five characters behind a pod's name."""


def mounts(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Every mount has its volume, every volume a mount, every path stands once."""
    volumes = {volume["name"] for volume in load.pod.get("volumes") or []}
    used = set()
    for container in load.containers:
        paths = set()
        for mount in container.get("volumeMounts") or []:
            used.add(mount["name"])
            if mount["name"] not in volumes:
                message = f"container {container['name']} mounts {mount['name']}, which is no volume of the pod"
                yield Problem("mounts", load.where, message)
            if mount["mountPath"] in paths:
                yield Problem("mounts", load.where, f"{mount['mountPath']} is mounted twice")
            paths.add(mount["mountPath"])
    for name in sorted(volumes - used):
        yield Problem("mounts", load.where, f"volume {name} is mounted by no container")


def references(load: Workload, rendered: list[Object]) -> Iterator[Problem]:
    """ConfigMaps, Secrets and claims that carry the job's own name exist, with the keys that are asked for.

    What has another name (a claim or a Secret of the user's) is taken to be in the cluster.
    """
    own = {(thing["kind"], thing["metadata"]["name"]): thing for thing in rendered}
    prefix = f"{load.labels.get('app.kubernetes.io/instance', '')}-"
    for kind, name, keys in _references(load.pod):
        thing = own.get((kind, name))
        if thing is None:
            secret_apart = kind == "Secret" and name == f"{prefix}token"  # made by submit, never rendered to a file
            if name.startswith(prefix) and len(prefix) > 1 and not secret_apart:
                yield Problem("references", load.where, f"{kind} {name} is not among the objects")
            continue
        have = {*(thing.get("data") or {}), *(thing.get("stringData") or {}), *(thing.get("binaryData") or {})}
        for key in keys - have:
            yield Problem("references", load.where, f"{kind} {name} has no key {key}")
    for flag in ("--fault-schedule", "--policy"):
        path = load.option(flag)
        if path is not None and not any(_provides(load.pod, own, path)):
            yield Problem("references", load.where, f"{flag} {path}: no mounted ConfigMap has that file")


def _references(pod: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    for volume in pod.get("volumes") or []:
        if "configMap" in volume:
            source = volume["configMap"]
            yield "ConfigMap", source["name"], {item["key"] for item in source.get("items") or []}
        if "secret" in volume:
            source = volume["secret"]
            yield "Secret", source["secretName"], {item["key"] for item in source.get("items") or []}
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], set()
    for container in [*(pod.get("initContainers") or []), *pod["containers"]]:
        for variable in container.get("env") or []:
            source = variable.get("valueFrom") or {}
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if field in source:
                    yield kind, source[field]["name"], {source[field]["key"]}
    for claim in pod.get("resourceClaims") or []:
        if "resourceClaimTemplateName" in claim:
            yield "ResourceClaimTemplate", claim["resourceClaimTemplateName"], set()


def _provides(pod: dict[str, Any], own: dict[tuple[str, str], Object], path: str) -> Iterator[bool]:
    folder, _, file = path.rpartition("/")
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or []}
    for mount in pod["containers"][0].get("volumeMounts") or []:
        source = volumes.get(mount["name"], {}).get("configMap")
        if mount["mountPath"] == folder and source and ("ConfigMap", source["name"]) in own:
            yield file in (own[("ConfigMap", source["name"])].get("data") or {})


def quantities(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Quantities parse, requests do not exceed limits, devices and huge pages are whole and the same in both."""
    for container in load.containers:
        resources = container.get("resources") or {}
        asked, limit = resources.get("requests") or {}, resources.get("limits") or {}
        for name in sorted({*asked, *limit}):
            try:
                low = parse_quantity(asked[name]) if name in asked else None
                high = parse_quantity(limit[name]) if name in limit else None
            except QuantityError as error:
                yield Problem("quantities", load.where, f"{name}: {error}")
                continue
            if low is not None and high is not None and low > high:
                yield Problem("quantities", load.where, f"{name}: request {asked[name]} is above limit {limit[name]}")
            if "/" in name or name.startswith("hugepages-"):
                if high is None or (low is not None and low != high):
                    yield Problem("quantities", load.where, f"{name}: needs a limit, equal to its request")
                elif high.denominator != 1:
                    yield Problem("quantities", load.where, f"{name}: {limit[name]} is not whole")
        if any(name.startswith("hugepages-") for name in limit) and not {"cpu", "memory"} & {*asked, *limit}:
            yield Problem("quantities", load.where, "huge pages need a request of cpu or memory beside them")
    for volume in load.pod.get("volumes") or []:
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        try:
            if size is not None:
                parse_quantity(size)
        except QuantityError as error:
            yield Problem("quantities", load.where, f"volume {volume['name']}: {error}")


def shared_memory(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Training pods have a memory-backed /dev/shm with a size, which fits into the pod's memory."""
    if load.option("--rdzv-endpoint") is None:
        return
    main = load.pod["containers"][0]
    names = {mount["name"] for mount in main.get("volumeMounts") or [] if mount["mountPath"] == "/dev/shm"}
    found = [v["emptyDir"] for v in load.pod.get("volumes") or [] if v["name"] in names and "emptyDir" in v]
    if not found or found[0].get("medium") != "Memory":
        yield Problem("shared-memory", load.where, "/dev/shm is no emptyDir with medium Memory: containers get 64 MiB")
        return
    size, memory = found[0].get("sizeLimit"), (main.get("resources", {}).get("limits") or {}).get("memory")
    if size is None:
        yield Problem("shared-memory", load.where, "/dev/shm has no sizeLimit")
    elif memory is not None:
        with contextlib.suppress(QuantityError):  # which `quantities` tells
            if parse_quantity(size) >= parse_quantity(memory):
                message = f"/dev/shm {size} does not fit into the memory limit {memory}"
                yield Problem("shared-memory", load.where, message)


def rights(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Nobody is root or can become it, nothing of the host is shared, no token of the API is handed out."""
    pod = load.pod
    context = pod.get("securityContext") or {}
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield Problem("rights", load.where, f"{key} shares the host")
    for volume in pod.get("volumes") or []:
        if "hostPath" in volume:
            yield Problem("rights", load.where, f"volume {volume['name']} is a hostPath")
    if pod.get("automountServiceAccountToken") is not False:
        yield Problem("rights", load.where, "automountServiceAccountToken is not false")
    for container in load.containers:
        own = container.get("securityContext") or {}
        where = f"container {container['name']}"
        if not own.get("runAsNonRoot", context.get("runAsNonRoot")) or own.get("runAsUser") == 0:
            yield Problem("rights", load.where, f"{where} may run as root")
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield Problem("rights", load.where, f"{where} may gain rights")
        if "ALL" not in (own.get("capabilities") or {}).get("drop", []) or (own.get("capabilities") or {}).get("add"):
            yield Problem("rights", load.where, f"{where} keeps or adds capabilities")


def plain_secrets(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """No credential stands in a manifest: neither as a variable's value nor on a command line."""
    for container in load.containers:
        for variable in container.get("env") or []:
            if _CREDENTIAL.search(variable["name"]) and variable.get("value"):
                yield Problem(
                    "plain-secrets", load.where, f"variable {variable['name']} holds its value in the manifest"
                )
    command = load.command
    for position, word in enumerate(command):
        if word.startswith("--") and _CREDENTIAL.search(word) and not word.split("=")[0].endswith("-file"):
            given = "=" in word or (position + 1 < len(command) and not command[position + 1].startswith("--"))
            if given:
                yield Problem("plain-secrets", load.where, f"{word.split('=')[0]} is given on the command line")


def ports(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Port names fit and stand once; probes ask for ports that exist; the coordinator binds to the port it declares."""
    for container in load.containers:
        declared = container.get("ports") or []
        names = [port["name"] for port in declared if "name" in port]
        numbers = [port["containerPort"] for port in declared]
        for name in names:
            if not _PORT_NAME.fullmatch(name):
                yield Problem("ports", load.where, f"port name {name!r}: at most 15 small letters, digits and -")
        if len(set(names)) != len(names) or len(set(numbers)) != len(numbers):
            yield Problem("ports", load.where, "a port stands twice")
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            check = container.get(probe) or {}
            target = (check.get("tcpSocket") or check.get("httpGet") or {}).get("port")
            if target is not None and target not in (*names, *numbers):
                yield Problem("ports", load.where, f"{probe} asks for port {target}, which no container declares")
    bind = load.option("--bind")
    if bind is not None:
        number = int(bind.rpartition(":")[2])
        if number not in [port["containerPort"] for port in load.pod["containers"][0].get("ports") or []]:
            yield Problem("ports", load.where, f"binds to {number} and does not declare it")


def grace(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """The pod's grace is longer than the launcher's, so that the last save is never cut off by the kubelet."""
    own, outer = load.option("--stop-grace"), load.pod.get("terminationGracePeriodSeconds", 30)
    if own is not None and float(own) + AGENT_S > outer:
        message = (
            f"--stop-grace {own} and {AGENT_S:g} s for the launcher's own end do not fit into "
            f"terminationGracePeriodSeconds {outer}: give {math.ceil(float(own) + AGENT_S)} or more, or stop sooner"
        )
        yield Problem("grace", load.where, message)


def names(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """Names that controllers make stay within 63 characters; names of containers and volumes are labels."""
    longest = len(f"{load.base}-{load.num_pods - 1}") + _SUFFIX
    if longest > 63:
        yield Problem(
            "names", load.where, f"names of its pods have {longest} characters, 63 are allowed: shorten the name"
        )
    for thing in [*load.containers, *(load.pod.get("volumes") or [])]:
        if not _LABEL.fullmatch(thing["name"]) or len(thing["name"]) > 63:
            yield Problem("names", load.where, f"{thing['name']!r} is no DNS label")


def images(load: Workload, _: list[Object]) -> Iterator[Problem]:
    """An image says which one it is: a tag other than latest, or a digest."""
    for container in load.containers:
        image = container.get("image", "")
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@sha256:" not in image and tag in ("", "latest"):
            yield Problem("images", load.where, f"image {image!r} may be another one tomorrow: give a tag or a digest")


POD_CHECKS: tuple[Callable[[Workload, list[Object]], Iterator[Problem]], ...] = (
    mounts,
    references,
    quantities,
    shared_memory,
    rights,
    plain_secrets,
    ports,
    grace,
    names,
    images,
)


def duplicates(rendered: list[Object]) -> Iterator[Problem]:
    """No object stands twice."""
    seen = set()
    for thing in rendered:
        metadata = thing.get("metadata") or {}
        key = (thing.get("apiVersion"), thing.get("kind"), metadata.get("namespace"), metadata.get("name"))
        if key in seen:
            yield Problem("duplicates", identity(thing), "stands twice")
        seen.add(key)
