"""Checks of the spec itself: limits that nest, memory and grace that suffice, a pod that fits its node."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ridethrough.cluster import kubelet, sizing
from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.quantity import GIB, parse_quantity
from ridethrough.cluster.schemas import Problem
from ridethrough.cluster.spec import JobSpec
from ridethrough.faults.schedule import ScheduleError, plan
from ridethrough.generation.policy import Policy

NODE_SILENT_S = 50
"""The node controller marks a silent node after this time (Kubernetes 1.29 and later; 40 before)."""
POD_START_S = 60
"""Scheduling, image that is there already, import of torch."""


def check_spec(spec: JobSpec) -> list[Problem]:
    """Everything that is wrong with a spec that is well-formed."""
    return [*_nesting(spec), *_grace(spec), *_memory(spec), *_node(spec), *_storage(spec), *_faults(spec)]


def _nesting(spec: JobSpec) -> Iterator[Problem]:
    """Each limit lies below the next outer one: in the process, the launcher, the orchestrator."""
    limits = spec.limits
    coordinator_wait_s = Policy(**spec.policy).coordinator_wait_s

    def below(inner: str, low: float, outer: str, high: float, why: str) -> Iterator[Problem]:
        if low >= high:
            yield Problem("limits", "limits", f"{inner} {low:g} must be below {outer} {high:g}: {why}")

    lost = "a node must be found lost before"
    yield from below(
        "lease_s", limits.lease_s, "the launcher's coordinator_wait_s", coordinator_wait_s, f"{lost} its agent gives up"
    )
    yield from below(
        "lease_s", limits.lease_s, "node_wait_s", limits.node_wait_s, f"{lost} its replacement is waited for"
    )
    yield from below(
        "a coordinator's new start, after",
        kubelet.JOB_FIRST_S + POD_START_S / 2,
        "the launcher's coordinator_wait_s",
        coordinator_wait_s,
        "else a lost coordinator ends the job",
    )
    if spec.standby == 0 and spec.nodes > 1:
        yield from below(
            "a replacement pod, after",
            NODE_SILENT_S + limits.unreachable_s + kubelet.JOB_FIRST_S + POD_START_S,
            "node_wait_s",
            limits.node_wait_s,
            "without a standby node the launcher must wait until Kubernetes has made one",
        )
    if limits.deadline_s is not None:
        yield from below("node_wait_s", limits.node_wait_s, "deadline_s", limits.deadline_s, "the whole job ends then")
        grace = sizing.pod_grace_s(spec)
        yield from below("the pod's grace", grace, "deadline_s", limits.deadline_s, "the whole job ends then")


def _grace(spec: JobSpec) -> Iterator[Problem]:
    needed = spec.state.step_s + sizing.flush_s(spec)
    inner, outer = sizing.stop_grace_s(spec), sizing.pod_grace_s(spec)
    if inner < needed:
        yield Problem(
            "grace",
            "limits.stop_grace_s",
            f"{inner:g} s is less than the rest of a step ({spec.state.step_s:g} s) and the write of "
            f"{spec.state.total_gb:g} GB at {spec.storage.write_gb_s:g} GB/s ({sizing.flush_s(spec):.0f} s): "
            f"give at least {math.ceil(needed)}, or leave it out",
        )
    if inner + sizing.AGENT_S > outer:
        yield Problem(
            "grace",
            "limits",
            f"stop_grace_s {inner:g} and {sizing.AGENT_S:g} s for the launcher's own end do not fit into pod_grace_s "
            f"{outer}: give pod_grace_s at least {math.ceil(inner + sizing.AGENT_S)}, or leave it out",
        )


def _memory(spec: JobSpec) -> Iterator[Problem]:
    have, need = parse_quantity(spec.resources.memory), sizing.pod_memory_bytes(spec)
    if have < need:
        slots = sizing.num_slots(spec)
        yield Problem(
            "memory",
            "resources.memory",
            f"{spec.resources.memory} is less than {-(-need // GIB)}Gi: {spec.nproc_per_node} ranks of "
            f"{spec.state.rank_host_gb:g} GB, {slots} snapshots of {spec.state.total_gb / spec.nodes:.3g} GB, "
            f"/dev/shm {spec.resources.shm}",
        )


def _node(spec: JobSpec) -> Iterator[Problem]:
    node = PROFILES[spec.profile].node
    if node is None:
        return
    memory = parse_quantity(spec.resources.memory) + parse_quantity(spec.resources.hugepages_2mi or "0")
    asked = (
        ("resources.cpu", parse_quantity(spec.resources.cpu), node.cpus - 1, "cores"),
        ("resources.memory and hugepages_2mi", memory / GIB, int(node.memory_gib * 0.95), "GiB"),
        ("resources.gpus", spec.resources.gpus, node.gpus, "GPUs"),
        ("resources.efa", spec.resources.efa, node.efa, "EFA interfaces"),
    )
    for field, value, most, unit in asked:
        if value > most:
            yield Problem("node", field, f"{float(value):g} {unit}, a pod can have {most} on {node.name}")


def _storage(spec: JobSpec) -> Iterator[Problem]:
    if spec.storage.fsx is not None and spec.storage.access != "ReadWriteMany":
        yield Problem("storage", "storage.access", "FSx for Lustre is mounted by all nodes: ReadWriteMany")
    if spec.storage.access == "ReadWriteOnce" and spec.placement.spread == "required" and spec.num_pods > 1:
        message = "ReadWriteOnce is mounted by one node, placement.spread required puts each pod on its own"
        yield Problem("storage", "storage.access", message)
    if spec.storage.claim is None:
        size = parse_quantity(spec.storage.fsx.size if spec.storage.fsx else spec.storage.size)
        need = 4 * spec.state.total_gb * 1e9  # three kept and one being written
        if size < need:
            message = f"{float(size) / 1e9:.3g} GB hold no four checkpoints of {spec.state.total_gb:g} GB"
            yield Problem("storage", "storage.size", message)


def _faults(spec: JobSpec) -> Iterator[Problem]:
    if spec.faults is None:
        return
    f = spec.faults
    try:
        plan(f.seed, f.count, f.types, f.weights, f.steps, spec.world_size)
    except ScheduleError as error:
        yield Problem("faults", "faults", str(error))
