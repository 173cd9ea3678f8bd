"""What a launch is asked to do."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.policy import Policy


class LaunchConfig(BaseModel):
    """One node's part of a job. `command` is [script.py, args...] or ["-m", module, args...]; with `no_python` it is
    a program and its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: list[str]
    num_workers: int = Field(1, ge=1, description="Ranks on this node.")
    no_python: bool = False
    policy: Policy = Policy()
    preload: list[str] = Field(default_factory=list, description="Modules that the zygote imports beforehand.")
    env: dict[str, str] = Field(default_factory=dict, description="Added to every worker's environment.")
    address: str = "127.0.0.1"
    master_port: int = Field(0, ge=0, le=65535, description="Port of the first store; 0 takes a free one.")
    echo: bool = Field(True, description="Show the workers' output with the rank as prefix.")
    cwd: str = Field(default_factory=os.getcwd)
    log_dir: Path | None = None
