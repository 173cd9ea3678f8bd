"""One pod of the lab: a process tree with its own network, memory limit, /dev/shm and host name."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import ridethrough
from ridethrough.cluster.lab import container
from ridethrough.cluster.lab.cgroup import MemoryCgroup
from ridethrough.cluster.lab.network import LabError, Switch
from ridethrough.cluster.quantity import parse_quantity
from ridethrough.cluster.workloads import Workload

_PACKAGE_FOLDER = Path(ridethrough.__file__).parents[1]
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class Volumes:
    """Where the lab keeps what pods mount. `named`: ConfigMaps and Secrets by (kind, name)."""

    shared: Path
    named: dict[tuple[str, str], Path]
    etc: Path


@dataclass
class Pod:
    """Made by `start`. `life` counts pods of the same index; `exit_code` is as the kubelet reports it."""

    load: Workload
    index: int
    life: int
    host: str
    node: str
    address: str
    namespace: str
    cable: str
    cgroup: MemoryCgroup
    process: subprocess.Popen[bytes]
    folder: Path
    started: float
    ended: float | None = None
    exit_code: int | None = None
    disrupted: bool = False
    _kill_at: float | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.host}-{self.life}"

    @property
    def ending(self) -> bool:
        """Whether its grace runs."""
        return self._kill_at is not None

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def poll(self) -> int | None:
        """The exit code once PID 1 has ended: then the kernel has killed the rest. Applies an expired grace."""
        if self.exit_code is not None:
            return self.exit_code
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.cgroup.kill_all()
        code = self.process.poll()
        if code is None:
            return None
        self.cgroup.kill_all()
        self.exit_code = 128 - code if code < 0 else code
        self.ended = time.monotonic()
        return self.exit_code

    def kill(self) -> None:
        """SIGKILL to all processes at once, as when a container's cgroup is killed."""
        self.cgroup.kill_all()

    def terminate(self) -> None:
        """What the kubelet does to end a pod: SIGTERM to PID 1, and SIGKILL to all after the pod's grace."""
        self._kill_at = time.monotonic() + self.load.pod.get("terminationGracePeriodSeconds", 30)
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for child in psutil.Process(self.process.pid).children():
                os.kill(child.pid, signal.SIGTERM)

    def remove(self, switch: Switch) -> None:
        """Nothing of it is left but its log."""
        self.cgroup.remove()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        switch.remove(self.namespace)


def start(
    load: Workload,
    index: int,
    life: int,
    *,
    switch: Switch,
    volumes: Volumes,
    folder: Path,
    lab: str,
    number: int,
    node: str,
    env: dict[str, str],
) -> Pod:
    """Make a pod and start its main container. Raises LabError; then nothing of it is left."""
    host = f"{load.base}-{index}"
    folder.mkdir(parents=True)
    namespace = f"{lab}-{number}"
    address, cable = switch.connect(namespace)
    main = load.pod["containers"][0]
    limit = (main.get("resources", {}).get("limits") or {}).get("memory", "8Gi")
    try:
        cgroup = MemoryCgroup(f"{lab}-{number}", int(parse_quantity(limit)))
    except LabError:
        switch.remove(namespace)
        raise
    environment = _environment(main, {"metadata.name": host, "status.podIP": address, "spec.nodeName": node})
    path_variable = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path_variable, "JOB_COMPLETION_INDEX": str(index), **env, **environment}
    hosts = folder / "hosts"  # as the kubelet writes it: a pod knows its own name without asking
    hosts.write_text(f"127.0.0.1 localhost\n{address} {f'{host}.{load.subdomain} ' if load.subdomain else ''}{host}\n")
    description = {
        "hosts": str(hosts),
        "network": f"/var/run/netns/{namespace}",
        "cgroup": str(cgroup.path),
        "etc": str(volumes.etc),
        "mounts": list(_mounts(load, volumes, folder)),
        "kept": [sys.prefix, str(_PACKAGE_FOLDER)],
        "host": host,
        "command": [_expand(word, environment) for word in load.command],
        "env": environment,
    }
    path = folder / "pod.json"
    path.write_text(json.dumps(description, indent=1))
    words = [sys.executable, "-I", container.__file__, str(path)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    return Pod(
        load=load,
        index=index,
        life=life,
        host=host,
        node=node,
        address=address,
        namespace=namespace,
        cable=cable,
        cgroup=cgroup,
        process=process,
        folder=folder,
        started=time.monotonic(),
    )


def _environment(main: dict[str, Any], fields: dict[str, str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for variable in main.get("env") or []:
        source = variable.get("valueFrom") or {}
        if "fieldRef" in source:
            out[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "value" in variable:
            out[variable["name"]] = _expand(variable["value"], out)
    return out


def _expand(word: str, env: dict[str, str]) -> str:
    """`$(NAME)` as Kubernetes puts it in: what is unknown stays as it is."""
    return _VARIABLE.sub(lambda match: env.get(match[1], match[0]), word)


def _mounts(load: Workload, volumes: Volumes, folder: Path) -> list[dict[str, Any]]:
    by_name = {volume["name"]: volume for volume in load.pod.get("volumes") or []}
    out: list[dict[str, Any]] = []
    for mount in load.pod["containers"][0].get("volumeMounts") or []:
        volume, target = by_name[mount["name"]], mount["mountPath"]
        empty = volume.get("emptyDir")
        if empty is not None and str(empty.get("medium", "")).startswith("HugePages"):
            continue
        if empty is not None and empty.get("medium") == "Memory":
            size = int(parse_quantity(empty.get("sizeLimit", "64Mi")))
            out.append({"kind": "tmpfs", "target": target, "bytes": size})
            continue
        source = _source(volume, volumes, folder)
        out.append({"kind": "bind", "source": str(source), "target": target, "read_only": bool(mount.get("readOnly"))})
    return out


def _source(volume: dict[str, Any], volumes: Volumes, folder: Path) -> Path:
    if "persistentVolumeClaim" in volume:
        return volumes.shared
    for key, kind, name in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
        if key in volume:
            found = volumes.named.get((kind, str(volume[key][name])))
            if found is None:
                raise LabError(f"volume {volume['name']}: the lab has no {kind} {volume[key][name]}")
            return found
    if "emptyDir" in volume:
        path: Path = folder / volume["name"]
        path.mkdir(exist_ok=True)
        return path
    raise LabError(f"volume {volume['name']}: the lab has no such kind of volume")


def private_etc(folder: Path, dns_address: str) -> Path:
    """A copy of /etc whose resolver asks the lab's DNS server, as in a pod: short names are tried as they stand."""
    path = folder / "etc"
    shutil.copytree("/etc", path, symlinks=True, ignore_dangling_symlinks=True)
    for name in ("resolv.conf", "hosts"):
        (path / name).unlink(missing_ok=True)
    (path / "resolv.conf").write_text(f"nameserver {dns_address}\noptions timeout:1 attempts:1\n")
    (path / "hosts").write_text("127.0.0.1 localhost\n")
    (path / "ridethrough").mkdir(exist_ok=True)
    return path
