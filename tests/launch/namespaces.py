"""Hosts made of network namespaces: each has an address of its own on one bridge, and its link can be cut."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess


def usable() -> str:
    """Empty if hosts can be made here, else why not."""
    if os.getuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    name = f"rt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Hosts 1 to n at 10.77.<net>.<host>. Use as a context manager."""

    def __init__(self, num_hosts: int) -> None:
        self.tag = secrets.token_hex(2)
        self.net = 1 + secrets.randbelow(250)
        self.hosts = list(range(1, num_hosts + 1))
        self.bridge = f"rtb{self.tag}"

    def __enter__(self) -> Network:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        for host in self.hosts:
            space, near, far = self.space(host), f"rtn{self.tag}{host}", f"rtf{self.tag}{host}"
            _ip("netns", "add", space)
            _ip("link", "add", near, "type", "veth", "peer", "name", far)
            _ip("link", "set", near, "master", self.bridge)
            _ip("link", "set", near, "up")
            _ip("link", "set", far, "netns", space)
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", far)
            _ip("-n", space, "link", "set", far, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def space(self, host: int) -> str:
        return f"rt{self.tag}{host}"

    def address(self, host: int) -> str:
        return f"10.77.{self.net}.{host}"

    def inside(self, host: int) -> list[str]:
        """What to put before a command so that it runs on the host, under a host name of its own."""
        return [
            "ip",
            "netns",
            "exec",
            self.space(host),
            "unshare",
            "-u",
            "sh",
            "-c",
            f'hostname host{host}; exec "$@"',
            "sh",
        ]

    def cut(self, host: int) -> None:
        _ip("link", "set", f"rtn{self.tag}{host}", "down")

    def heal(self, host: int) -> None:
        _ip("link", "set", f"rtn{self.tag}{host}", "up")

    def kill_all(self, host: int) -> None:
        """Everything on the host is gone in one moment, without a word."""
        self.cut(host)
        pids = subprocess.run(["ip", "netns", "pids", self.space(host)], check=True, capture_output=True, text=True)
        for pid in map(int, pids.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def pids(self, host: int) -> set[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space(host)], check=True, capture_output=True, text=True)
        return set(map(int, found.stdout.split()))
