"""Versions and machine of this process: for bug reports and beside measured figures. Reads only, imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from ridethrough.health import cgroup
from ridethrough.version import __version__

_PACKAGES = ("torch", "numpy", "typer", "rich", "pydantic", "psutil", "xxhash")
_GPU_QUERY = "name,memory.total,driver_version"
_GPU_TIMEOUT_S = 10.0


def environment(folder: Path = Path()) -> dict[str, dict[str, Any]]:
    """`{"versions": ..., "machine": ..., "limits": ..., "gpus": ...}`; None where there is no limit or no answer.

    Sizes end in `_bytes`; disk space is that of `folder`. Takes at most 10 s (a driver that hangs counts as no answer).
    """
    return {"versions": _versions(), "machine": _machine(folder), "limits": _limits(), "gpus": _gpus()}


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"ridethrough": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _machine(folder: Path) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()) or None,
        "python_executable": sys.executable,
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "swap_bytes": psutil.swap_memory().total,
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "dev_shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    }


def _limits() -> dict[str, Any]:
    return {
        "cgroup_memory_bytes": cgroup.memory_limit_bytes(),
        "cgroup_memory_used_bytes": cgroup.memory_used_bytes(),
        "cgroup_cpus": cgroup.cpu_limit(),
        "cgroup_pids": cgroup.pids_limit(),
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "processes": _soft_limit(resource.RLIMIT_NPROC),
        "locked_memory_bytes": _soft_limit(resource.RLIMIT_MEMLOCK),
    }


def _soft_limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus() -> dict[str, Any]:
    """What nvidia-smi says; count is 0 where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except FileNotFoundError:
        return {"count": 0, "devices": [], "problem": None}
    except (OSError, subprocess.SubprocessError) as error:
        return {"count": None, "devices": [], "problem": f"nvidia-smi: {error}"}
    devices = []
    for line in answer.stdout.strip().splitlines():
        name, memory_mib, driver = (part.strip() for part in line.split(","))
        memory = int(memory_mib) << 20 if memory_mib.isdigit() else None
        devices.append({"name": name, "memory_bytes": memory, "driver": driver})
    return {"count": len(devices), "devices": devices, "problem": None}
