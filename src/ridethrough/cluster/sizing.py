"""Figures that follow from a spec: time of the last save, time to stop a pod, memory."""

from __future__ import annotations

import math

from ridethrough.cluster.quantity import GIB, parse_quantity
from ridethrough.cluster.spec import JobSpec

OWN_SLOTS = 5
"""Snapshots of its own that a node holds at most: base, candidate, newest, filling, one more during a durable write."""
REPLICA_SLOTS = 2
"""Snapshots of a peer."""
FLUSH_RESERVE = 1.25
"""A file system that is busy is slower than its figure."""
AGENT_S = 5.0
"""From the end of the last save to the end of the agent: reaping, closing the run, telling the coordinator."""


def flush_s(spec: JobSpec) -> float:
    """Seconds to make the newest snapshot durable: all nodes write at once and share the file system."""
    return spec.state.total_gb / spec.storage.write_gb_s


def stop_grace_s(spec: JobSpec) -> float:
    """The launcher's `--stop-grace`: given, or the rest of a step and a flush with reserve, whole seconds."""
    if spec.limits.stop_grace_s is not None:
        return spec.limits.stop_grace_s
    return float(math.ceil(max(10.0, spec.state.step_s + FLUSH_RESERVE * flush_s(spec))))


def pod_grace_s(spec: JobSpec) -> int:
    """terminationGracePeriodSeconds: given, or the launcher's grace and the agent's own end."""
    if spec.limits.pod_grace_s is not None:
        return spec.limits.pod_grace_s
    return math.ceil(stop_grace_s(spec) + AGENT_S)


def num_slots(spec: JobSpec) -> int:
    """Snapshots that a node's memory may hold at once: its own, and of several nodes one more and replicas."""
    return OWN_SLOTS + (1 + REPLICA_SLOTS if spec.nodes > 1 else 0)


def pod_memory_bytes(spec: JobSpec) -> int:
    """What a training pod needs: ranks, the launcher, snapshots (memfd pages are charged to the pod) and /dev/shm."""
    slots = num_slots(spec)
    snapshots = slots * spec.state.total_gb * 1e9 / spec.nodes
    ranks = spec.nproc_per_node * spec.state.rank_host_gb * 1e9
    launcher = 0.5 * GIB
    return int(ranks + snapshots + launcher + parse_quantity(spec.resources.shm))
