"""What every worker of a node finds in its environment, whatever its rank."""

from __future__ import annotations

import os
from pathlib import Path

from ridethrough.launch.config import LaunchConfig
from ridethrough.ledger.rundir import RunDir

# A remote error must not tear the survivors down: leaving a generation is our business (abort, then re-entry).
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}


def worker_environment(config: LaunchConfig, run: RunDir, folder: Path, job: str) -> dict[str, str]:
    """The launcher's own environment, ours, and what the user asked for; ranks come later, per worker."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RIDETHROUGH_TOKEN")}
    for name, value in _NCCL.items():
        env.setdefault(name, value)
    if config.num_workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        RIDETHROUGH_RUN_DIR=str(run.path),
        RIDETHROUGH_AGENT=str(folder / "agent.sock"),
        RIDETHROUGH_KEEPER=str(folder / "keeper.sock"),
        RIDETHROUGH_JOB=job,
        TORCHELASTIC_RUN_ID=run.run_id,
        TORCHELASTIC_MAX_RESTARTS=str(config.policy.max_restarts),
        ROLE_NAME="default",
    )
    env.update(config.env)
    return env
