"""The command lines that run in the pods, in one place. Exec form, no shell: the launcher is PID 1 and gets SIGTERM."""

from __future__ import annotations

from ridethrough.cluster import sizing
from ridethrough.cluster.spec import JobSpec

TOKEN_FOLDER = "/etc/ridethrough/token"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
METRICS_FILE = f"{TOKEN_FOLDER}/metrics"
METRICS_PORT = 8765
CONFIG_FOLDER = "/etc/ridethrough/job"
SCHEDULE_FILE = f"{CONFIG_FOLDER}/faults.json"
POLICY_FILE = f"{CONFIG_FOLDER}/policy.json"


def nnodes(spec: JobSpec) -> str:
    """MIN:MAX of the world. Standby nodes are no part of it: they join beyond MAX and wait."""
    return f"{spec.min_nodes or spec.nodes}:{spec.nodes}"


def _shared(spec: JobSpec) -> list[str]:
    return [
        *("--nnodes", nnodes(spec)),
        *("--nproc-per-node", str(spec.nproc_per_node)),
        *("--token-file", TOKEN_FILE),
        *("--runs", f"{spec.storage.mount}/runs"),
        *("--run-id", spec.name),
        *("--max-restarts", str(spec.limits.max_restarts)),
        *("--stop-grace", f"{sizing.stop_grace_s(spec):g}"),
        *("--node-wait", f"{spec.limits.node_wait_s:g}"),
        *("--lease", f"{spec.limits.lease_s:g}"),
        *(("--policy", POLICY_FILE) if spec.policy else ()),
    ]


def coordinator(spec: JobSpec) -> list[str]:
    """Of the coordinator's container."""
    return ["ridethrough", "coordinator", "--bind", f"0.0.0.0:{spec.port}", *_shared(spec)]


def agent(spec: JobSpec, endpoint: str) -> list[str]:
    """Of a training container; `endpoint` is HOST:PORT of the coordinator, resolved anew at each attempt."""
    command = [
        *("ridethrough", "run", "--join"),
        *("--rdzv-endpoint", endpoint),
        # Kubernetes puts the variables' values here. The machine's name, since a pod takes its own to the next machine.
        *("--local-addr", "$(POD_IP)"),
        *("--node-name", "$(NODE_NAME)"),
        *_shared(spec),
    ]
    if spec.faults is not None:
        command += ["--fault-schedule", SCHEDULE_FILE, "--fault-steps", str(spec.faults.steps)]
    return [*command, *spec.script]


def metrics(spec: JobSpec) -> list[str]:
    """Of the container beside the coordinator that answers Prometheus, and serves the dashboard to a port-forward."""
    where = f"{spec.storage.mount}/runs"
    return [
        "ridethrough",
        "dash",
        where,
        "--host",
        "0.0.0.0",
        "--port",
        str(METRICS_PORT),
        "--token-file",
        METRICS_FILE,
    ]


def prepare(spec: JobSpec) -> list[str]:
    """Of the data preparation's container."""
    assert spec.data is not None
    return ["ridethrough", "data", "prepare", *spec.data.args]
