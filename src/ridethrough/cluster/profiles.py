"""What differs between kinds of machine, and nothing else: the same script and the same spec run on each.

Instance figures are those of the EC2 instance type pages (vCPU, GiB, GPUs, EFA interfaces); a pod asks for a little
less than the whole node, which also runs the kubelet and the device plugins.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NodeShape:
    """What a training node has."""

    name: str
    cpus: int
    memory_gib: int
    gpus: int
    efa: int


@dataclass(frozen=True)
class Profile:
    """`defaults` are fields of JobSpec; the user's file goes before them. `about` is a line for people."""

    name: str
    about: str
    node: NodeShape | None
    defaults: dict[str, Any]


def _reference_job(preset: str, steps: int, every: int, *more: str) -> list[str]:
    options = ["--preset", preset, "--steps", str(steps), "--checkpoint-every", str(every)]
    return ["-m", "ridethrough.train", *options, *more]


_EFA_ENV = {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "^lo,docker,veth", "NCCL_DEBUG": "WARN"}
_IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/ridethrough:efa-1"
_FSX = {
    "fsx": {
        "file_system_id": "fs-0123456789abcdef0",
        "dns_name": "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com",
        "mount_name": "abcdefgh",
        "size": "1200Gi",
    },
    # SCRATCH_2 gives 200 MB/s per TiB all the time, 1.2 TB of it; more only while its burst credit lasts.
    "write_gb_s": 0.24,
}


def _eks(instance: str, **resources: Any) -> dict[str, Any]:
    return {
        "image": _IMAGE,
        "nodes": 2,
        "standby": 1,
        "env": dict(_EFA_ENV) if resources["efa"] else {"NCCL_DEBUG": "WARN"},
        "nproc_per_node": resources["gpus"],
        "resources": resources,
        "storage": copy.deepcopy(_FSX),
        "placement": {
            "node_selector": {"node.kubernetes.io/instance-type": instance},
            "coordinator_node_selector": {"ridethrough/role": "system"},
            "tolerate": ["nvidia.com/gpu"],
        },
    }


_LLAMA_8B = {
    "script": _reference_job("llama3.1-8b", 2000, 500, "--dtype", "bf16", "--data", "/shared/data"),
    "state": {"total_gb": 96.4, "rank_host_gb": 8.0, "step_s": 10.0},
}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "eks-p5",
            "EKS, p5.48xlarge: 8 H100, 32 EFA interfaces, FSx for Lustre",
            NodeShape("p5.48xlarge", 192, 2048, 8, 32),
            _eks(
                "p5.48xlarge",
                cpu="176",
                memory="1600Gi",
                gpus=8,
                efa=32,
                hugepages_2mi="5120Mi",
                shm="64Gi",
                scratch="200Gi",
            )
            | _LLAMA_8B,
        ),
        Profile(
            "eks-p4de",
            "EKS, p4de.24xlarge: 8 A100 with 80 GB, 4 EFA interfaces, FSx for Lustre",
            NodeShape("p4de.24xlarge", 96, 1152, 8, 4),
            _eks(
                "p4de.24xlarge",
                cpu="88",
                memory="900Gi",
                gpus=8,
                efa=4,
                hugepages_2mi="5120Mi",
                shm="64Gi",
                scratch="200Gi",
            )
            | _LLAMA_8B,
        ),
        Profile(
            "eks-g5",
            "EKS, g5.12xlarge: 4 A10G, no EFA, FSx for Lustre",
            NodeShape("g5.12xlarge", 48, 192, 4, 1),
            _eks("g5.12xlarge", cpu="44", memory="160Gi", gpus=4, efa=0, shm="16Gi", scratch="100Gi")
            | {
                "script": _reference_job("1b", 2000, 500, "--dtype", "bf16", "--data", "/shared/data"),
                "state": {"total_gb": 14.9, "rank_host_gb": 6.0, "step_s": 10.0},
            },
        ),
        Profile(
            "generic-gpu",
            "Any cluster with NVIDIA GPUs and a ReadWriteMany storage class",
            None,
            {
                "image": "registry.example.com/ridethrough:gpu-1",
                "nodes": 2,
                "standby": 1,
                "nproc_per_node": 8,
                "script": _reference_job("1b", 2000, 500, "--dtype", "bf16", "--data", "/shared/data"),
                "resources": {"cpu": "32", "memory": "256Gi", "gpus": 8, "shm": "16Gi", "scratch": "100Gi"},
                "storage": {"storage_class": "", "size": "500Gi", "write_gb_s": 1.0},
                "state": {"total_gb": 14.9, "rank_host_gb": 6.0, "step_s": 10.0},
                "placement": {"tolerate": ["nvidia.com/gpu"]},
            },
        ),
        Profile(
            "cpu",
            "CPU only, small enough for kind on a laptop",
            None,
            {
                "image": "ridethrough:cpu",
                "nodes": 2,
                "standby": 1,
                "nproc_per_node": 2,
                "script": _reference_job("tiny", 200, 25),
                "resources": {"cpu": "2", "memory": "3Gi", "shm": "256Mi", "scratch": "2Gi"},
                # kind's class has no ReadWriteMany; on its one node this does as well.
                "storage": {
                    "storage_class": "standard",
                    "size": "5Gi",
                    "access": "ReadWriteOnce",
                    "write_gb_s": 0.2,
                },
                "state": {"total_gb": 0.012, "rank_host_gb": 0.7, "step_s": 1.0},
                "placement": {"spread": "none"},
                "limits": {"node_wait_s": 300.0},
            },
        ),
    )
}
"""Name -> profile, in the order of documentation."""
