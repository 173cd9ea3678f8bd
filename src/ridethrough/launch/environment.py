"""What every worker of a node finds in its environment, whatever its rank."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from pathlib import Path

import psutil

from ridethrough.generation import messages as m
from ridethrough.generation.handshake import TOKEN_VARIABLE
from ridethrough.launch.config import LaunchConfig
from ridethrough.ledger.rundir import RunDir

# A remote error must not tear the survivors down: leaving a generation is our business (abort, then re-entry).
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}

_OUTER = {"RIDETHROUGH_WORKER", "RIDETHROUGH_HEARTBEAT"}  # of the worker that this launcher may itself run in


def without_token() -> dict[str, str]:
    """The launcher's own environment, less the job's token."""
    return {name: value for name, value in os.environ.items() if not name.startswith(TOKEN_VARIABLE)}


def worker_environment(config: LaunchConfig, run: RunDir, folder: Path, job: str, address: str) -> dict[str, str]:
    """The launcher's own environment, ours, and what the user asked for; ranks come later, per worker. `address` is
    this node's, by which its peers reach it."""
    env = {name: value for name, value in without_token().items() if name not in _OUTER}
    for name, value in _NCCL.items():
        env.setdefault(name, value)
    if config.num_workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    interface = _interface_of(address) if config.max_nodes > 1 else ""
    if interface:  # else gloo looks its own host name up, and takes the loopback where that is not resolvable
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    env.update(
        RIDETHROUGH_RUN_DIR=str(run.path),
        RIDETHROUGH_AGENT=str(folder / "agent.sock"),
        RIDETHROUGH_KEEPER=str(folder / "keeper.sock"),
        RIDETHROUGH_JOB=job,
        TORCHELASTIC_RUN_ID=run.run_id,
        TORCHELASTIC_MAX_RESTARTS=str(config.policy.max_restarts),
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(signal.Signals(number).name for number in config.signals),
        ROLE_NAME=config.role,
    )
    env.update(config.env)
    return env


def _interface_of(address: str) -> str:
    """The network interface with this address; empty for the loopback and for an address of nobody here."""
    try:
        numeric = socket.getaddrinfo(address, None)[0][4][0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == numeric for found in addresses):
            return "" if ipaddress.ip_address(numeric).is_loopback else name
    return ""


def rank_environment(config: LaunchConfig, spawn: m.Spawn) -> dict[str, str]:
    """What torchrun tells a worker of its place; `rt.run` brings it up to date at each generation."""
    host, _, port = spawn.store.rpartition(":")
    local = {"LOCAL_RANK": str(spawn.local_rank)}
    if config.virtual_local_rank:
        local = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _visible_device(spawn.local_rank)}
    return {
        "RANK": str(spawn.rank),
        **local,
        "WORLD_SIZE": str(spawn.world_size),
        "LOCAL_WORLD_SIZE": str(spawn.world_size // spawn.num_nodes),
        "GROUP_RANK": str(spawn.group_rank),
        "GROUP_WORLD_SIZE": str(spawn.num_nodes),
        "ROLE_RANK": str(spawn.rank),
        "ROLE_WORLD_SIZE": str(spawn.world_size),
        "MASTER_ADDR": host or "127.0.0.1",
        "MASTER_PORT": port or "0",
        "TORCHELASTIC_RESTART_COUNT": str(spawn.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def with_local_rank(command: list[str], local_rank: int) -> list[str]:
    """torchrun's one macro in the script's arguments."""
    return [word.replace("${local_rank}", str(local_rank)) for word in command]


def _visible_device(local_rank: int) -> str:
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return seen[local_rank] if local_rank < len(seen) else str(local_rank)
