"""Each check has a bad example, made of a good one by one change, that it and only it must refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ridethrough.cluster.job_checks import JOB_CHECKS
from ridethrough.cluster.objects import Object
from ridethrough.cluster.pod_checks import POD_CHECKS
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.render import render
from ridethrough.cluster.validate import validate_objects
from ridethrough.cluster.workloads import workloads

SPEC = (
    "name: llama\nprofile: eks-p5\nbackend: {backend}\nfaults: {{count: 2, steps: 50}}\n"
    "policy: {{cordon_after: 3}}\noptions: {{monitoring: true}}\n"
)


def objects(backend: str = "job") -> list[Object]:
    return copy.deepcopy(render(parse_spec(SPEC.format(backend=backend)), token="t" * 64))


def trainer(rendered: list[Object]) -> Any:
    return next(load for load in workloads(rendered) if load.option("--rdzv-endpoint"))


def coordinator(rendered: list[Object]) -> Any:
    return next(load for load in workloads(rendered) if load.option("--bind"))


def main(rendered: list[Object]) -> dict[str, Any]:
    return trainer(rendered).pod["containers"][0]  # type: ignore[no-any-return]


def of_kind(rendered: list[Object], kind: str) -> Object:
    return next(thing for thing in rendered if thing["kind"] == kind)


def rules(rendered: list[Object], part: Callable[[list[Object]], Any]) -> list[dict[str, Any]]:
    return part(rendered).job["podFailurePolicy"]["rules"]  # type: ignore[no-any-return]


def replace_word(command: list[str], flag: str, value: str) -> None:
    command[command.index(flag) + 1] = value


def shm(rendered: list[Object]) -> dict[str, Any]:
    volumes = trainer(rendered).pod["volumes"]
    return next(volume for volume in volumes if volume["name"] == "shm")  # type: ignore[no-any-return]


def tmp(rendered: list[Object]) -> dict[str, Any]:
    volumes = trainer(rendered).pod["volumes"]
    return next(volume for volume in volumes if volume["name"] == "tmp")  # type: ignore[no-any-return]


def few(rendered: list[Object]) -> None:
    rendered.remove(of_kind(rendered, "PodDisruptionBudget"))
    of_kind(rendered, "HyperPodPyTorchJob")["spec"]["replicaSpecs"][1]["replicas"] = 1


def shm_mount(rendered: list[Object]) -> dict[str, Any]:
    return next(mount for mount in main(rendered)["volumeMounts"] if mount["mountPath"] == "/dev/shm")


Change = Callable[[list[Object]], Any]

BAD: list[tuple[str, str, Change, str]] = [
    ("mounts", "job", lambda o: trainer(o).pod["volumes"].pop(), "which is no volume"),
    ("mounts", "job", lambda o: trainer(o).pod["volumes"].append({"name": "x", "emptyDir": {}}), "by no container"),
    (
        "mounts",
        "job",
        lambda o: main(o)["volumeMounts"].append({"name": "tmp", "mountPath": "/shared"}),
        "/shared is mounted twice",
    ),
    ("references", "job", lambda o: o.remove(of_kind(o, "ConfigMap")), "ConfigMap llama-job is not among"),
    ("references", "job", lambda o: o.remove(of_kind(o, "PersistentVolumeClaim")), "llama-shared is not among"),
    ("references", "job", lambda o: of_kind(o, "ConfigMap")["data"].pop("faults.json"), "faults.json: no mounted"),
    ("references", "job", lambda o: of_kind(o, "ConfigMap")["data"].pop("policy.json"), "policy.json: no mounted"),
    (
        "references",
        "job",
        lambda o: main(o)["env"].append(
            {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "llama-job", "key": "no"}}}
        ),
        "ConfigMap llama-job has no key no",
    ),
    ("quantities", "job", lambda o: main(o)["resources"]["limits"].update(memory="1.6 Ti"), "no quantity"),
    ("quantities", "job", lambda o: main(o)["resources"]["requests"].update(cpu="177"), "above limit"),
    ("quantities", "job", lambda o: main(o)["resources"]["limits"].pop("nvidia.com/gpu"), "needs a limit"),
    (
        "quantities",
        "job",
        lambda o: [main(o)["resources"][k].update({"nvidia.com/gpu": "7.5"}) for k in ("requests", "limits")],
        "is not whole",
    ),
    ("shared-memory", "job", lambda o: shm(o)["emptyDir"].pop("medium"), "no emptyDir with medium Memory"),
    ("shared-memory", "job", lambda o: shm(o)["emptyDir"].pop("sizeLimit"), "no sizeLimit"),
    ("shared-memory", "job", lambda o: shm(o)["emptyDir"].update(sizeLimit="2Ti"), "does not fit"),
    ("rights", "job", lambda o: trainer(o).pod["securityContext"].pop("runAsNonRoot"), "may run as root"),
    ("rights", "job", lambda o: trainer(o).pod.update(hostIPC=True), "hostIPC shares the host"),
    ("rights", "job", lambda o: main(o)["securityContext"].update(privileged=True), "may gain rights"),
    ("rights", "job", lambda o: main(o)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "capabilities"),
    ("rights", "job", lambda o: trainer(o).pod.pop("automountServiceAccountToken"), "automountServiceAccountToken"),
    (
        "rights",
        "job",
        lambda o: tmp(o).update(hostPath={"path": "/tmp"}) or tmp(o).pop("emptyDir"),
        "is a hostPath",
    ),
    ("plain-secrets", "job", lambda o: main(o)["env"].append({"name": "HF_TOKEN", "value": "hf_x"}), "HF_TOKEN"),
    ("plain-secrets", "job", lambda o: main(o)["command"].insert(2, "--token=abc"), "--token is given"),
    ("ports", "job", lambda o: coordinator(o).pod["containers"][0]["ports"][0].update(name="X" * 16), "port name"),
    (
        "ports",
        "job",
        lambda o: coordinator(o).pod["containers"][0]["ports"][0].update(containerPort=1234),
        "does not declare it",
    ),
    (
        "ports",
        "job",
        lambda o: coordinator(o).pod["containers"][0]["readinessProbe"]["tcpSocket"].update(port="web"),
        "asks for port web",
    ),
    ("grace", "job", lambda o: trainer(o).pod.update(terminationGracePeriodSeconds=30), "do not fit into"),
    ("grace", "job", lambda o: trainer(o).pod.pop("terminationGracePeriodSeconds"), "terminationGracePeriodSeconds 30"),
    ("names", "job", lambda o: of_kind(o, "Job")["metadata"].update(name="a" * 60), "63 are allowed"),
    ("names", "hyperpod", lambda o: [v.update(name="Shm") for v in (shm(o), shm_mount(o))], "no DNS label"),
    ("images", "job", lambda o: main(o).update(image="registry:5000/ridethrough"), "give a tag or a digest"),
    ("images", "job", lambda o: main(o).update(image="ridethrough:latest"), "give a tag or a digest"),
    ("restart-policy", "job", lambda o: trainer(o).pod.update(restartPolicy="OnFailure"), "needs restartPolicy Never"),
    ("restart-policy", "job", lambda o: trainer(o).job.pop("podFailurePolicy"), "no podFailurePolicy"),
    (
        "restart-policy",
        "jobset",
        lambda o: trainer(o).job.update(podReplacementPolicy="TerminatingOrFailed"),
        "needs podReplacementPolicy Failed",
    ),
    ("exit-codes", "jobset", lambda o: rules(o, trainer).append(rules(o, trainer).pop(0)), "a drain may end the job"),
    ("exit-codes", "job", lambda o: rules(o, trainer).pop(0), "a drain may end the job"),
    (
        "exit-codes",
        "job",
        lambda o: rules(o, trainer)[1]["onExitCodes"]["values"].remove(83),
        "FailJob for [2, 81, 84]",
    ),
    ("exit-codes", "job", lambda o: rules(o, trainer)[1]["onExitCodes"]["values"].append(137), "137"),
    ("exit-codes", "job", lambda o: rules(o, trainer)[1]["onExitCodes"].update(containerName="pytorch"), "pytorch"),
    ("addresses", "job", lambda o: o.remove(of_kind(o, "Service")), "has no Service of that name"),
    ("addresses", "job", lambda o: of_kind(o, "Service")["spec"].pop("publishNotReadyAddresses"), "before readiness"),
    ("addresses", "job", lambda o: of_kind(o, "Service")["spec"].pop("clusterIP"), "must be headless"),
    (
        "addresses",
        "jobset",
        lambda o: of_kind(o, "JobSet")["spec"]["network"].update(publishNotReadyAddresses=False),
        "publishNotReadyAddresses",
    ),
    (
        "addresses",
        "trainjob",
        lambda o: replace_word(main(o)["command"], "--rdzv-endpoint", "llama-node-0-0.llama:29400"),
        "where no coordinator listens",
    ),
    (
        "addresses",
        "job",
        lambda o: replace_word(main(o)["command"], "--rdzv-endpoint", "llama-coordinator-0.llama:29500"),
        "known: llama-coordinator-0.llama:29400",
    ),
    (
        "selectors",
        "job",
        lambda o: of_kind(o, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].update(app="x"),
        "picks no pod",
    ),
    (
        "selectors",
        "job",
        lambda o: of_kind(o, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="web"),
        "no pod declares a port web",
    ),
    ("schema", "job", lambda o: of_kind(o, "PodMonitor")["spec"].update(endpoints=[]), "no such field"),
    ("selectors", "job", lambda o: of_kind(o, "PodDisruptionBudget")["spec"].update(minAvailable=3), "can be drained"),
    ("world", "job", lambda o: trainer(o).job.update(parallelism=1), "completions equal to parallelism"),
    ("world", "jobset", lambda o: trainer(o).job.update(completionMode="NonIndexed"), "must be Indexed"),
    ("world", "hyperpod", few, "waits for 2 nodes and has 1 pods"),
    ("duplicates", "job", lambda o: o.append(copy.deepcopy(o[0])), "stands twice"),
    ("schema", "job", lambda o: of_kind(o, "Job")["spec"].update(backofLimit=3), "backofLimit"),
    ("schema", "job", lambda o: of_kind(o, "Service")["spec"].update(publishNotReadyAddresses="yes"), "yes"),
    ("schema", "job", lambda o: of_kind(o, "Job").update(apiVersion="batch/v2"), "has no Job in batch/v2"),
    ("schema", "jobset", lambda o: trainer(o).pod.update(restartPolicies="Never"), "restartPolicies"),
    ("schema", "jobset", lambda o: of_kind(o, "JobSet")["spec"].update(replicas=1), "no such field"),
    (
        "schema",
        "jobset",
        lambda o: of_kind(o, "JobSet")["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
        "'FailJobSet'",
    ),
    (
        "schema",
        "jobset",
        lambda o: of_kind(o, "JobSet")["spec"]["failurePolicy"]["rules"][0].update(onJobFailureReasons=["Preempted"]),
        "'PodFailurePolicy'",
    ),
    (
        "schema",
        "jobset",
        lambda o: of_kind(o, "JobSet")["spec"]["successPolicy"].update(targetReplicatedJobs=["workers"]),
        "no replicated job is called workers",
    ),
    ("schema", "trainjob", lambda o: main(o).update(name="main"), "must be called node"),
    ("schema", "trainjob", lambda o: of_kind(o, "TrainJob")["spec"].pop("runtimeRef"), "Field required"),
    ("schema", "trainjob", lambda o: of_kind(o, "TrainJob")["spec"]["trainer"].update(numNodes=0), "greater than"),
    ("schema", "hyperpod", lambda o: of_kind(o, "HyperPodPyTorchJob")["spec"].update(nprocPerNode=8), "valid string"),
    (
        "schema",
        "hyperpod",
        lambda o: of_kind(o, "HyperPodPyTorchJob")["spec"]["runPolicy"].update(maxRetry=1),
        "no such field",
    ),
    ("schema", "hyperpod", lambda o: trainer(o).pod["containers"][0].update(volumeMount=[]), "volumeMount"),
]


@pytest.mark.parametrize(("rule", "backend", "change", "words"), BAD, ids=[f"{r}-{w[:24]}" for r, _, _, w in BAD])
def test_the_bad_example_is_refused_by_its_check_alone(rule: str, backend: str, change: Change, words: str) -> None:
    rendered = objects(backend)
    assert validate_objects(rendered).problems == []
    change(rendered)
    problems = validate_objects(rendered).problems
    assert any(problem.rule == rule and words in str(problem) for problem in problems), problems
    # one mistake, one check; a thing that goes missing may also leave a name dangling
    others = {problem.rule for problem in problems} - {rule}
    assert others <= {"mounts", "addresses"}, problems


def test_every_check_has_a_bad_example() -> None:
    checks = {check.__name__.replace("_", "-") for check in (*POD_CHECKS, *JOB_CHECKS)}
    assert checks <= {rule for rule, *_ in BAD}
