"""Take a run's folder home: events, logs, incidents, report; checkpoints if asked for. Each file is checked.

A small pod mounts the volume read-only and serves the folder; the API server's pod proxy carries it. Needs the rights
to make and delete pods and to get pods/proxy. A file that is there already with the same hash is not fetched again, and
one that was cut off goes on where it stopped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridethrough.cluster import naming
from ridethrough.cluster.api import Address, Api, ApiError
from ridethrough.cluster.folder_server import PORT, file_hash
from ridethrough.cluster.objects import Object
from ridethrough.cluster.spec import JobSpec

_POLL_S = 1.0
_TRIES = 4


@dataclass(frozen=True)
class Collected:
    """What `collect` brought."""

    folder: Path
    num_files: int
    num_bytes: int
    num_there: int


def collector_pod(spec: JobSpec, word: str) -> Object:
    """Small, read-only, ends itself after six hours if nobody takes it away."""
    container: Object = {
        "name": naming.CONTAINER,
        "image": spec.image,
        "command": ["python", "-m", "ridethrough.cluster.folder_server", f"{spec.storage.mount}/runs/{spec.name}"],
        "env": [{"name": "RIDETHROUGH_WORD", "value": word}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 2},
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "shared", "mountPath": spec.storage.mount, "readOnly": True}],
    }
    body: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": 6 * 3600,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": spec.uid,
            "runAsGroup": spec.uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": naming.claim(spec), "readOnly": True}}],
    }
    if spec.placement.coordinator_node_selector:
        body["nodeSelector"] = dict(spec.placement.coordinator_node_selector)
    # Not an instance of the job: its network policy must not apply, nor must `delete` wait for it.
    labels = {naming.NAME_LABEL: "ridethrough", naming.COMPONENT_LABEL: "collector"}
    name = f"{spec.name}-collect-{word[:5]}"
    metadata = {"name": name, "namespace": spec.namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def collect(
    api: Api,
    spec: JobSpec,
    out: Path,
    *,
    checkpoints: bool = False,
    start_timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
) -> Collected:
    """Fetch the run's folder into `out`. Raises ApiError; what was fetched until then stays."""
    word = secrets.token_hex(16)
    pod = collector_pod(spec, word)
    where, name = Address("v1", "Pod", spec.namespace), pod["metadata"]["name"]
    api.create(pod)
    try:
        _wait_until_ready(api, where, name, start_timeout_s)
        root = f"{where.path(f'{name}:{PORT}', 'proxy')}/{word}"
        entries = api.request("GET", f"{root}/list", query={"checkpoints": "1" if checkpoints else "0"})
        num_bytes = num_there = 0
        for entry in entries:
            target = _inside(out, str(entry["path"]))
            if _fetch(api, root, str(entry["path"]), int(entry["bytes"]), target):
                num_bytes += int(entry["bytes"])
                say(f"{entry['path']} ({entry['bytes']} bytes)")
            else:
                num_there += 1
        return Collected(out, len(entries), num_bytes, num_there)
    finally:
        api.delete(where, name)


def _inside(out: Path, relative: str) -> Path:
    """The server is the job's image, which may be anything: no path leads out of `out`."""
    target = (out / relative).resolve()
    if not target.is_relative_to(out.resolve()):
        raise ApiError("invalid", f"the collector offers {relative!r}, which leads out of {out}")
    return target


def _wait_until_ready(api: Api, where: Address, name: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        status = api.get(where, name).get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
        if conditions.get("Ready") == "True":
            return
        if status.get("phase") in ("Failed", "Succeeded"):
            raise ApiError("server", f"Pod/{name} ended at once: no ridethrough in its image, or no such run")
        if time.monotonic() >= end:
            raise ApiError("timeout", f"Pod/{name} is not ready after {timeout_s:g} s: kubectl describe pod says why")
        api.sleep(_POLL_S)


def _fetch(api: Api, root: str, path: str, size: int, target: Path) -> bool:
    """Bring one file, in place only when its hash is right. False if it was there."""
    for attempt in range(_TRIES):
        # Asked for anew each time: the file of a job that runs may have grown.
        expected = api.request("GET", f"{root}/hash", query={"path": path})["xxh3_128"]
        if target.is_file() and file_hash(target) == expected:
            return attempt > 0
        part = target.with_name(f"{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.is_file() and part.stat().st_size <= size else 0
        try:
            with part.open("ab" if have else "wb") as file:
                for piece in api.content(f"{root}/file", {"path": path, "offset": have}):
                    file.write(piece)
        except ApiError as error:
            if error.kind not in ("unreachable", "timeout", "server") or attempt == _TRIES - 1:
                raise
            api.sleep(_POLL_S)
            continue
        if file_hash(part) == expected:
            part.replace(target)
            return True
        part.unlink()
    raise ApiError("server", f"{path}: changes while it is read; collect again when the job has ended")
