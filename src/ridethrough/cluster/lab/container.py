"""From a description to a running container: namespaces, cgroup, private mounts, host name, then exec as PID 1.

    python container.py DESCRIPTION.json

Waits for PID 1 and ends as it did, with 128 + n for signal n. Stands alone (no package imports): it costs milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

_NEW_MOUNT, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RDONLY, _MS_REMOUNT = 4096, 16384, 1 << 18, 1, 32


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() if word is not None else None for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def enter(network: str) -> None:
    """New namespaces for what is forked from now on, and the pod's network for us too."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(fd, _NEW_NET) or libc.unshare(_NEW_MOUNT | _NEW_UTS | _NEW_IPC | _NEW_PID):
        raise OSError(ctypes.get_errno(), f"namespaces: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        pod = json.load(file)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a lab that is killed leaves no pod running
    enter(pod["network"])
    child = os.fork()
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _, status = os.waitpid(child, 0)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    become(pod)


def become(pod: dict[str, Any]) -> None:
    """In the child, which is PID 1 of the pod: everything private, then the container's command."""
    # Before any mount hides it.
    with open(f"{pod['cgroup']}/cgroup.procs", "w", encoding="utf-8") as file:
        file.write("0")
    # Sources are held open, since a mount may hide another one's source: the package itself, where it lies below /tmp.
    sources = {path: os.open(path, os.O_PATH) for path in pod["kept"]}
    for entry in pod["mounts"]:
        if entry["kind"] == "bind":
            sources[entry["source"]] = os.open(entry["source"], os.O_PATH)
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc", 0)
    mount(pod["etc"], "/etc", None, _MS_BIND)
    mount(pod["hosts"], "/etc/hosts", None, _MS_BIND)
    for entry in pod["mounts"]:
        os.makedirs(entry["target"], exist_ok=True)
        if entry["kind"] == "tmpfs":
            mount("tmpfs", entry["target"], "tmpfs", 0, f"size={entry['bytes']},mode=1777")
            continue
        mount(f"/proc/self/fd/{sources[entry['source']]}", entry["target"], None, _MS_BIND)
        if entry["read_only"]:
            mount("none", entry["target"], None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
    for path in pod["kept"]:
        if not os.path.exists(path):
            os.makedirs(path)
            mount(f"/proc/self/fd/{sources[path]}", path, None, _MS_BIND)
    socket.sethostname(pod["host"])
    os.chdir("/tmp")
    os.execvpe(pod["command"][0], pod["command"], pod["env"])


if __name__ == "__main__":
    main(sys.argv[1])
