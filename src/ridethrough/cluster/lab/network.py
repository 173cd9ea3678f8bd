"""Network namespaces on one bridge: a switch, and a namespace for each pod, with its own address and cable."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable

from ridethrough.cluster.lab.dns import DnsServer

_CLONE_NEWNET = 0x40000000
_PREFIX = "10.77"


class LabError(RuntimeError):
    """The lab cannot do its work here; the message is one line with what is needed."""


def ip(*words: str) -> None:
    """`ip WORDS`. Raises LabError with its words."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Switch:
    """The bridge, in a namespace of its own so that the machine's network stays as it is, and the DNS server on it."""

    def __init__(self, name: str) -> None:
        """`name`: short and unique on this machine."""
        self.name = f"{name}-sw"
        self._cables = 0
        ip("netns", "add", self.name)
        try:
            self._in("link", "set", "lo", "up")
            self._in("link", "add", "br0", "type", "bridge")
            self._in("addr", "add", f"{_PREFIX}.0.1/16", "dev", "br0")
            self._in("link", "set", "br0", "up")
            self.dns = DnsServer(inside(self.name, _dns_socket))
        except BaseException:
            ip("netns", "del", self.name)
            raise

    @property
    def dns_address(self) -> str:
        return f"{_PREFIX}.0.1"

    def connect(self, namespace: str) -> tuple[str, str]:
        """Make `namespace` with a cable to the bridge: (its address, the name of the cable's end at the bridge)."""
        self._cables += 1
        number, end = self._cables, f"c{self._cables}"
        address = f"{_PREFIX}.{1 + number // 250}.{1 + number % 250}"
        ip("netns", "add", namespace)
        self._in("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._in("link", "set", end, "master", "br0")
        self._in("link", "set", end, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/16", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            ip("-n", namespace, *words)
        return address, end

    def pull(self, end: str) -> None:
        """Pull a cable: nothing gets through, nobody is told."""
        self._in("link", "set", end, "down")

    def plug(self, end: str) -> None:
        """Put it back."""
        self._in("link", "set", end, "up")

    def remove(self, namespace: str) -> None:
        """Delete a pod's namespace; its cable goes with it."""
        ip("netns", "del", namespace)

    def close(self) -> None:
        self.dns.close()
        ip("netns", "del", self.name)

    def _in(self, *words: str) -> None:
        ip("-n", self.name, *words)


def _dns_socket() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((f"{_PREFIX}.0.1", 53))
    return server


def inside(namespace: str, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket made in a network namespace; it stays there. A thread enters, so that this one stays where it is."""
    out: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            fd = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(fd)
            out.append(make())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=enter, name="lab-enter")
    thread.start()
    thread.join()
    if failed:
        raise LabError(f"cannot use the network namespace {namespace}: {failed[0]}")
    return out[0]
