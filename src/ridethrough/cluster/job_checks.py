"""What schemas cannot see between objects: retry rules, exit codes, addresses, selectors that pick nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ridethrough.cluster.exit_rules import FATAL_CODES, UNCOUNTED_CODES
from ridethrough.cluster.objects import Object
from ridethrough.cluster.schemas import Problem, identity
from ridethrough.cluster.workloads import Workload, workloads


def restart_policy(rendered: list[Object]) -> Iterator[Problem]:
    """A failure policy works only if Kubernetes sees every exit (Never) and no pod has two lives at once (Failed)."""
    for load in workloads(rendered):
        if load.job is None:
            continue
        if "podFailurePolicy" not in load.job:
            yield Problem("restart-policy", load.where, "no podFailurePolicy: a drain counts as the program's failure")
            continue
        policy = load.pod.get("restartPolicy")
        if policy != "Never":
            yield Problem("restart-policy", load.where, f"podFailurePolicy needs restartPolicy Never, not {policy}")
        if load.job.get("podReplacementPolicy", "Failed") != "Failed":
            yield Problem("restart-policy", load.where, "podFailurePolicy needs podReplacementPolicy Failed")


def exit_codes(rendered: list[Object]) -> Iterator[Problem]:
    """The rules say what the table of exit codes says, and look at disruptions first."""
    for load in workloads(rendered):
        rules = ((load.job or {}).get("podFailurePolicy") or {}).get("rules") or []
        if not rules:
            continue
        first = next((i for i, rule in enumerate(rules) if rule.get("onExitCodes")), len(rules))
        disrupted = next((i for i, rule in enumerate(rules) if _ignores_disruption(rule)), None)
        if disrupted is None or disrupted > first:
            message = "no rule Ignore for DisruptionTarget before the exit codes: a drain may end the job"
            yield Problem("exit-codes", load.where, message)
        for action, expected in (("FailJob", FATAL_CODES), ("Ignore", UNCOUNTED_CODES)):
            found = {
                code
                for rule in rules
                if rule.get("action") == action and (rule.get("onExitCodes") or {}).get("operator") == "In"
                for code in rule["onExitCodes"]["values"]
            }
            if found != set(expected):
                message = f"{action} for {sorted(found)}, the launcher's codes for that are {list(expected)}"
                yield Problem("exit-codes", load.where, message)
        containers = {container["name"] for container in load.pod["containers"]}
        for rule in rules:
            name = (rule.get("onExitCodes") or {}).get("containerName")
            if name is not None and name not in containers:
                yield Problem(
                    "exit-codes", load.where, f"a rule is about container {name}, which the pod does not have"
                )


def _ignores_disruption(rule: Object) -> bool:
    conditions = [condition.get("type") for condition in rule.get("onPodConditions") or []]
    return rule.get("action") == "Ignore" and "DisruptionTarget" in conditions


def addresses(rendered: list[Object]) -> Iterator[Problem]:
    """The endpoint that agents are told is the name and port of a coordinator, resolvable before anything is ready."""
    loads = workloads(rendered)
    services = [thing for thing in rendered if thing.get("kind") == "Service"]
    reachable: dict[str, str] = {}
    for load in loads:
        bind = load.option("--bind")
        if bind is None:
            continue
        port = bind.rpartition(":")[2]
        reachable |= {f"{host}:{port}": load.where for host in load.host_names()}
        for service in services:
            if _picks(service["spec"].get("selector") or {}, load) and load.num_pods == 1:
                reachable[f"{service['metadata']['name']}:{port}"] = load.where
    for load in loads:
        endpoint = load.option("--rdzv-endpoint")
        if endpoint is not None and endpoint not in reachable:
            known = ", ".join(sorted(reachable)) or "none"
            yield Problem("addresses", load.where, f"joins {endpoint}, where no coordinator listens (known: {known})")
        own_subdomain = load.pod.get("subdomain")
        if own_subdomain and own_subdomain not in [service["metadata"]["name"] for service in services]:
            yield Problem("addresses", load.where, f"subdomain {own_subdomain} has no Service of that name")
    for service in services:
        spec = service["spec"]
        if spec.get("clusterIP") != "None" or spec.get("publishNotReadyAddresses") is not True:
            message = "must be headless (clusterIP None) with publishNotReadyAddresses: names before readiness"
            yield Problem("addresses", identity(service), message)
    for thing in rendered:
        if thing.get("kind") not in ("JobSet", "TrainingRuntime"):
            continue
        spec = thing["spec"] if thing["kind"] == "JobSet" else thing["spec"]["template"]["spec"]
        network = spec.get("network") or {}
        if not network.get("enableDNSHostnames") or network.get("publishNotReadyAddresses", True) is not True:
            yield Problem("addresses", identity(thing), "network needs enableDNSHostnames and publishNotReadyAddresses")


def selectors(rendered: list[Object]) -> Iterator[Problem]:
    """Every selector picks at least one pod; a disruption budget leaves room for a drain."""
    loads = workloads(rendered)
    for thing in rendered:
        spec = thing.get("spec") or {}
        if thing.get("kind") == "Service":
            chosen = spec.get("selector") or {}
        elif thing.get("kind") == "NetworkPolicy":
            chosen = (spec.get("podSelector") or {}).get("matchLabels") or {}
        elif thing.get("kind") in ("PodDisruptionBudget", "PodMonitor"):
            chosen = (spec.get("selector") or {}).get("matchLabels") or {}
        else:
            continue
        picked = [load for load in loads if _picks(chosen, load)]
        if not picked:
            yield Problem("selectors", identity(thing), f"picks no pod: {chosen}")
        if thing["kind"] == "PodMonitor":
            declared = {port.get("name") for load in picked for c in load.containers for port in c.get("ports") or []}
            for endpoint in spec.get("podMetricsEndpoints") or []:
                if endpoint.get("port") not in declared:
                    yield Problem("selectors", identity(thing), f"no pod declares a port {endpoint.get('port')}")
        at_least = spec.get("minAvailable")
        total = sum(load.num_pods for load in picked)
        if thing["kind"] == "PodDisruptionBudget" and isinstance(at_least, int) and at_least >= total:
            yield Problem(
                "selectors", identity(thing), f"minAvailable {at_least} of {total} pods: no node can be drained"
            )


def world(rendered: list[Object]) -> Iterator[Problem]:
    """Jobs are indexed and run all their pods at once; there are pods for the world that the launcher waits for."""
    for load in workloads(rendered):
        nnodes = load.option("--nnodes")
        if nnodes is None:
            continue
        if load.job is not None:
            job = load.job
            if job.get("completionMode") != "Indexed" or job.get("completions") != job.get("parallelism"):
                message = "must be Indexed with completions equal to parallelism: a rank that waits its turn stops all"
                yield Problem("world", load.where, message)
        most = int(nnodes.rpartition(":")[2])
        if load.option("--rdzv-endpoint") is not None and load.num_pods < most:
            yield Problem("world", load.where, f"waits for {most} nodes and has {load.num_pods} pods")


def _picks(selector: dict[str, str], load: Workload) -> bool:
    return all(load.labels.get(key) == value for key, value in selector.items())


JOB_CHECKS: tuple[Callable[[list[Object]], Iterator[Problem]], ...] = (
    restart_policy,
    exit_codes,
    addresses,
    selectors,
    world,
)
