"""What a launch is asked to do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ridethrough.generation.policy import Policy
from ridethrough.launch.tls import TlsFiles


class LaunchConfig(BaseModel):
    """One node's part of a job. `command` is [script.py, args...] or ["-m", module, args...]; with `no_python` it is
    a program and its arguments."""

    model_config = ConfigDict(extra="forbid")

    command: list[str]
    num_workers: int = Field(1, ge=1, description="Ranks on this node.")
    no_python: bool = False
    policy: Policy = Policy()
    spares: int = Field(1, ge=0, description="Warm spares: processes that wait for a rank to need one.")
    preload: list[str] = Field(default_factory=list, description="Modules that the zygote imports beforehand.")
    env: dict[str, str] = Field(default_factory=dict, description="Added to every worker's environment.")
    min_nodes: int = Field(1, ge=1, description="Least number of nodes that may train.")
    max_nodes: int = Field(1, ge=1, description="Nodes that train if they are there; more stand by.")
    endpoint: tuple[str, int] | None = Field(None, description="Host and port of the coordinator; None: one node.")
    may_host: bool = Field(True, description="Host the coordinator if the endpoint is this machine's and is free.")
    must_host: bool = Field(False, description="Host it here, or end.")
    place: int | None = Field(None, ge=0, description="This node's wish among the places; None: first come.")
    address: str | None = Field(None, description="This node's own address for its peers; None: found out.")
    node_name: str = Field("", description="What cordons call this machine; empty: its host name.")
    token: str = Field("", description="Known to every agent and coordinator of the job.", repr=False)
    tls: TlsFiles | None = Field(None, description="For the connections between agents and coordinator.")
    replicas: int = Field(1, ge=0, le=1, description="Other nodes that hold a copy of each node's newest snapshot.")
    replica_rate: float = Field(0.0, ge=0, description="Bytes per second that a node may send for that; 0: no limit.")
    master_port: int = Field(0, ge=0, le=65535, description="Port of the first store; 0 takes a free one.")
    role: str = Field("default", description="ROLE_NAME of the workers.")
    virtual_local_rank: bool = Field(False, description="LOCAL_RANK is 0 for all; each sees its own GPU only.")
    numa_binding: str | None = Field(None, description="How workers are bound to the cores near their GPUs.")
    signals: tuple[int, ...] = Field(
        (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT), description="Each asks for a planned end."
    )
    echo: bool = Field(True, description="Show the workers' output with the rank as prefix.")
    hidden: dict[int, frozenset[str]] = Field(
        default_factory=dict, description='Streams ("out", "err") of a local rank that are not shown.'
    )
    shown_ranks: frozenset[int] | None = Field(None, description="Local ranks whose output is shown; None: all.")
    filters: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description='Stream ("out", "err") -> words; lines with one go to a file of their own.'
    )
    cwd: str = Field(default_factory=os.getcwd)
    log_dir: Path | None = None
