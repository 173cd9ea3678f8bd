"""Ranks from the environment of each launcher, and the refusal of several nodes without a token."""

from __future__ import annotations

import pytest

from ridethrough.restart import side_agent
from ridethrough.restart.launched_by import Ranks, where


def test_a_plain_start_is_one_rank() -> None:
    assert where({}) == Ranks("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "")


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    env |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}
    env |= {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert where(env) == Ranks("torchrun", 5, 1, 8, 4, 1, 2, "node0", 29511, "job7.0")


def test_bare_rank_and_world_size_are_one_node() -> None:
    ranks = where({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"})
    assert (ranks.rank, ranks.local_rank, ranks.local_world_size, ranks.num_nodes) == (1, 1, 2, 1)


def test_srun_with_its_node_list() -> None:
    env = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
    env |= {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[03-04]"}
    assert where(env) == Ranks("srun", 9, 1, 16, 8, 1, 2, "gpu03", 29500, "77.3")


def test_a_batch_script_of_slurm_is_no_step() -> None:
    assert where({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "77"}).by == "plain"


def test_open_mpi_and_hydra() -> None:
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    env |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ranks = where(env | {"MASTER_ADDR": "a"})
    assert (ranks.rank, ranks.local_rank, ranks.node_rank, ranks.num_nodes, ranks.host) == (3, 1, 1, 2, "a")
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    ranks = where(env)
    assert (ranks.by, ranks.rank, ranks.num_nodes, ranks.host) == ("mpirun", 1, 1, "127.0.0.1")


def test_half_an_environment_is_an_error_with_its_remedy() -> None:
    with pytest.raises(ValueError, match="RANK is set but WORLD_SIZE is not: set both"):
        where({"RANK": "x", "WORLD_SIZE": "", "LOCAL_RANK": "0"} | {"RANK": "1"})


def test_several_nodes_without_a_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RIDETHROUGH_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match=r"over 2 nodes needs the job's token: .*set RIDETHROUGH_TOKEN_FILE=FILE"):
        side_agent.join(max_restarts=1, min_world_size=None)
