"""The file that `ridethrough k8s init` writes: every choice a user makes, with its meaning, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.spec import SpecError


def template(profile: str, name: str = "train") -> str:
    """A commented spec for `profile`, valid as it is. Raises SpecError if there is no such profile."""
    if profile not in PROFILES:
        raise SpecError(f"--profile {profile}: none of {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
    spec = parse_spec(f"name: {name}\nprofile: {profile}\n")
    d = chosen.defaults
    lines = [
        f"# A protected training job: {chosen.about}.",
        "#   ridethrough k8s validate FILE      check it, without a cluster",
        "#   ridethrough k8s submit FILE --wait start it and follow it to its end",
        "# What is left out has the profile's value; `ridethrough k8s render FILE` shows all that follows from it.",
        f"name: {name}",
        "namespace: default",
        f"profile: {profile}             # {', '.join(PROFILES)}",
        "backend: jobset             # jobset, job (plain Kubernetes), trainjob (Kubeflow Trainer), hyperpod",
        f"image: {spec.image}",
        "",
        f"nodes: {spec.nodes}                    # that train",
        f"standby: {spec.standby}                  # more nodes, warm, that take a lost one's place at once",
        "# min_nodes: 1              # go on with fewer when no node comes; default: wait, then give up",
        f"nproc_per_node: {spec.nproc_per_node}           # ranks on each",
        "script:                     # [train.py, ARGS...] or [-m, module, ARGS...]",
        *_list(spec.script),
        *_map("env", spec.env),
        "",
        "resources:                  # of one training pod; snapshots and /dev/shm count as its memory",
        *_fields(d["resources"]),
        "",
        "storage:                    # shared by all pods: checkpoints, runs, data",
        "  # claim: my-claim         # a PersistentVolumeClaim that exists; or storage_class: NAME; or fsx: ...",
        *_fields(d["storage"]),
        f"  mount: {spec.storage.mount}",
        "",
        "state:                      # decides the memory for snapshots and the time for the last save",
        *_fields(d["state"]),
        "",
        "limits:                     # from the launcher outwards; times in seconds",
        f"  max_restarts: {spec.limits.max_restarts}         # the launcher's own",
        f"  pod_failures: {spec.limits.pod_failures}          # per node, replaced by Kubernetes; drains do not count",
        f"  job_restarts: {spec.limits.job_restarts}           # of everything, after that",
        f"  node_wait_s: {spec.limits.node_wait_s:g}          # for the replacement of a lost node",
        "  # pod_grace_s: 60         # default: what the last save needs, computed from state and storage",
        "  # deadline_s: 86400       # of the whole job",
        "",
        "# policy:                   # what else decides about recovery: any setting of docs/policy.md",
        "#   cordon_after: 3         # a machine that was lost so often is not used again; 0: never",
        "#   eval_limit_s: 1800",
        "",
        "placement:",
        *_fields(d.get("placement", {})),
        "  # near: topology.k8s.aws/network-node-layer-3   # label that nodes should share",
        "  # priority_class: training",
        "  # queue: my-queue         # Kueue",
        "",
        "# data:                     # made on CPU before the job starts",
        "#   args: [--text, /shared/corpus, --out, /shared/data]",
        "",
        "# faults:                   # on purpose, the same in every run with this seed",
        "#   count: 5",
        "#   seed: 42",
        "#   types: [exception, hang, sigkill]",
        "#   steps: 2000",
        "",
        "options:",
        "  network_policy: true      # only pods of this job reach its ports",
        "  disruption_budget: true   # drain at most as many nodes at once as stand by",
        "  monitoring: false         # PodMonitor, alerts, dashboard: needs the Prometheus operator",
        "  # hugging_face_secret: hugging-face   # a Secret with the key HF_TOKEN",
    ]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """A YAML scalar; JSON's double quotes where plain text would be read as something else."""
    if isinstance(value, str) and value and value[0].isalpha() and value.replace("-", "").replace(".", "").isalnum():
        return value
    return json.dumps(value)


def _list(values: list[str]) -> list[str]:
    """The words of a command, options with their values on one line."""
    lines: list[list[str]] = []
    for value in values:
        if not lines or value.startswith("-"):
            lines.append([])
        lines[-1].append(_scalar(value))
    text = ",\n   ".join(", ".join(line) for line in lines)
    return f"  [{text}]".split("\n")


def _map(name: str, values: dict[str, str]) -> list[str]:
    if not values:
        return [f"{name}: {{}}"]
    return [f"{name}:", *(f"  {key}: {_scalar(value)}" for key, value in values.items())]


def _fields(values: dict[str, Any], indent: str = "  ") -> list[str]:
    out = []
    for key, value in values.items():
        if isinstance(value, dict):
            out += [f"{indent}{key}:", *_fields(value, indent + "  ")]
        elif isinstance(value, list):
            out.append(f"{indent}{key}: [{', '.join(_scalar(item) for item in value)}]")
        else:
            out.append(f"{indent}{key}: {_scalar(value)}")
    return out
