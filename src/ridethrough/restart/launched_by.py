"""Which rank is this process? What torchrun, srun, mpirun and a plain start leave in the environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """This process's place. `by` names the launcher; `host` is where rank 0's node is reached, empty if nobody says so;
    `job` tells this launch from others on the machine."""

    by: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    host: str
    port: int
    job: str


def where(env: Mapping[str, str]) -> Ranks:
    """Raises ValueError, one line with the remedy, if the environment is half told."""
    for by, names in _LAUNCHERS:
        if names["rank"] in env and names["world_size"] in env:
            return _read(by, names, env)
    return Ranks("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "")


_LAUNCHERS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "torchrun",
        {
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
            "num_nodes": "GROUP_WORLD_SIZE",
            "job": "TORCHELASTIC_RUN_ID",
            "attempt": "TORCHELASTIC_RESTART_COUNT",
        },
    ),
    (
        "mpirun",
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "world_size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
            "node_rank": "OMPI_COMM_WORLD_NODE_RANK_OF_HOST",
            "num_nodes": "OMPI_MCA_num_nodes",
            "job": "PMIX_NAMESPACE",
            "attempt": "",
        },
    ),
    (
        "srun",
        {
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_NTASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world_size": "SLURM_NTASKS_PER_NODE",
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_NNODES",
            "job": "SLURM_JOB_ID",
            "attempt": "SLURM_STEP_ID",
        },
    ),
    (
        "mpirun",
        {
            "rank": "PMI_RANK",
            "world_size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_world_size": "MPI_LOCALNRANKS",
            "node_rank": "HYDRA_NODE_RANK",
            "num_nodes": "HYDRA_NUM_NODES",
            "job": "PMI_JOBID",
            "attempt": "",
        },
    ),
)


def _read(by: str, names: Mapping[str, str], env: Mapping[str, str]) -> Ranks:
    def number(name: str, default: int | None = None) -> int:
        text = env.get(names[name], "")
        if not text.isdigit():
            if default is not None:
                return default
            raise ValueError(
                f"{names['rank']} is set but {names[name]} is not: set both, or start with ridethrough run"
            )
        return int(text)

    rank, world_size = number("rank"), number("world_size")
    if by == "srun" and world_size == 1 and "SLURM_STEP_ID" not in env:
        return Ranks("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "")  # the batch script itself, not a step of it
    nodes = number("num_nodes", 0)
    local_world_size = number("local_world_size", world_size // nodes if nodes else world_size)
    num_nodes = nodes or -(-world_size // local_world_size)
    local_rank = number("local_rank", rank % local_world_size)
    host = env.get("MASTER_ADDR", "")
    if not host:
        host = "127.0.0.1" if num_nodes == 1 else _first_host(env.get("SLURM_STEP_NODELIST", ""))
    port = int(env.get("MASTER_PORT") or _DEFAULT_PORT)
    job = f"{env.get(names['job'], '')}.{env.get(names['attempt'], '')}"
    node_rank = number("node_rank", rank // local_world_size)
    return Ranks(by, rank, local_rank, world_size, local_world_size, node_rank, num_nodes, host, port, job)


def _first_host(nodes: str) -> str:
    """`gpu[03-07,9],login` -> `gpu03`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return found.group(1) + (found.group(2) or "") if found else ""
