"""Ways to lose a node: all of its processes at once, or its network."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ridethrough.faults.shot import FaultRefused, Shot
from ridethrough.generation.peer import peer_credentials

_SIOCSIFFLAGS = 0x8914  # linux/sockios.h; flags without IFF_UP take an interface down


def guard_several_nodes(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused where the node is the whole job."""
    if "RIDETHROUGH_AGENT" not in os.environ or int(os.environ.get("GROUP_WORLD_SIZE", "1")) < 2:
        raise FaultRefused(
            "fault kind node_loss is UNAVAILABLE: this job has one node, and its loss is the job's; "
            "start it on several with `ridethrough run --nnodes`, and its coordinator apart from them"
        )


def node_loss(shot: Shot) -> None:
    """SIGKILL to this node's agent and to everything below it. The agent stands still meanwhile, so that it tells
    nobody of the deaths, and dies last but one: this process dies with it. The node's files stay."""
    agent = psutil.Process(_agent_pid())
    agent.suspend()
    for process in agent.children(recursive=True):
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    agent.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def guard_own_network(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused unless this process is in a network namespace that somebody has made by `ip netns add`: the
    machine's own network (or the container's) is not ours to cut."""
    own = os.stat("/proc/self/ns/net").st_ino
    if own not in [path.stat().st_ino for path in Path("/run/netns").glob("*")]:
        raise FaultRefused(
            "fault kind cut_network is UNAVAILABLE: this node has no network of its own to cut; "
            "run its agent as root in a network namespace (`ip netns add NAME`, `ip netns exec NAME ridethrough run`)"
        )


def cut_network(shot: Shot) -> None:
    """Take down every interface of this network namespace but the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            if name != "lo":
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name.encode(), 0))


def _agent_pid() -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(10)
        link.connect(os.environ["RIDETHROUGH_AGENT"])
        return peer_credentials(link)[0]
