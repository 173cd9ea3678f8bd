"""What is rendered: golden files for every profile and backend, and the facts that matter in them.

UPDATE_GOLDEN=1 writes the files anew; look at the difference before committing it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridethrough.cluster import monitoring
from ridethrough.cluster.backends import BACKENDS
from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.reading import parse_spec
from ridethrough.cluster.render import render, to_yaml
from ridethrough.cluster.spec import JobSpec
from ridethrough.cluster.validate import validate_objects, validate_spec
from ridethrough.cluster.workloads import Workload, workloads
from ridethrough.generation.exit_codes import EXIT_CODES

GOLDEN = Path(__file__).with_name("golden")
ALL = [(profile, backend) for profile in PROFILES for backend in BACKENDS]

EVERYTHING = """
standby: 2
env: {MINE: "1"}
resources: {efa: 4, efa_from: dra}
placement: {near: rack, priority_class: training, priority: 1000, queue: team, coordinator_node_selector: {pool: cpu}}
faults: {count: 3, steps: 100}
data: {args: [--out, /shared/data]}
limits: {deadline_s: 100000}
options: {hugging_face_secret: hf, image_pull_secret: registry, monitoring: true}
"""


def make(profile: str = "cpu", backend: str = "jobset", more: str = "") -> JobSpec:
    return parse_spec(f"name: llama\nprofile: {profile}\nbackend: {backend}\n{more}")


def by_component(rendered: list[dict[str, Any]]) -> dict[str, Workload]:
    return {load.labels["app.kubernetes.io/component"]: load for load in workloads(rendered)}


@pytest.mark.parametrize(("profile", "backend"), ALL)
def test_golden(profile: str, backend: str) -> None:
    spec = make(profile, backend)
    text = to_yaml(render(spec), spec)
    path = GOLDEN / f"{profile}-{backend}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {f"{profile}-{backend}" for profile, backend in ALL}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kubernetes_version_takes_it(backend: str) -> None:
    for profile in PROFILES:
        report = validate_spec(make(profile, backend), every_version=True)
        assert report.problems == []
        assert report.kubernetes[0] == "1.30" and len(report.kubernetes) >= 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_every_option_too(backend: str) -> None:
    spec = make("cpu", backend, EVERYTHING)
    report = validate_spec(spec, every_version=True)
    assert report.problems == []
    kinds = [thing["kind"] for thing in render(spec, token="t" * 64)]
    assert kinds[:9] == [
        "PriorityClass",
        "PersistentVolumeClaim",
        "ConfigMap",
        "Secret",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "ResourceClaimTemplate",
        "PodMonitor",
        "Job",
    ]


def test_the_text_is_the_objects_and_the_same_in_every_process() -> None:
    spec = make(more=EVERYTHING)
    text = to_yaml(render(spec), spec)
    assert list(yaml.safe_load_all(text)) == render(spec)
    code = (
        "from ridethrough.cluster.reading import parse_spec; from ridethrough.cluster.render import *; import sys;"
        "s = parse_spec(sys.argv[1]); sys.stdout.write(to_yaml(render(s), s))"
    )
    argument = f"name: llama\nprofile: cpu\nbackend: jobset\n{EVERYTHING}"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", code, argument], env=environment, capture_output=True, text=True, check=True
        )
        assert out.stdout == text


def test_render_and_validate_take_less_than_two_seconds(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: llama\nprofile: eks-p5\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for verb in ("render", "validate"):
        command = [sys.executable, "-m", "ridethrough", "k8s", verb, str(tmp_path / "job.yaml")]
        subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of CPU: the machine may be busy with other things.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


# Cases from public trackers, by their numbers.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a03_shared_memory_is_a_memory_volume_with_a_size(backend: str) -> None:
    pod = by_component(render(make("eks-p5", backend)))["trainer"].pod
    mount = next(m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm")
    volume = next(v for v in pod["volumes"] if v["name"] == mount["name"])
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


@pytest.mark.parametrize("backend", ["jobset", "job", "trainjob"])
def test_a05_and_c45_the_rules_are_the_table_of_exit_codes(backend: str) -> None:
    for load in workloads(render(make(backend=backend))):
        assert load.job is not None
        rules = load.job["podFailurePolicy"]["rules"]
        assert rules[0] == {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
        fatal = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
        assert fatal == [[int(row.code) for row in EXIT_CODES if row.retry == "no"]]
        assert load.pod["restartPolicy"] == "Never"
        assert load.job["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("backend", BACKENDS)
def test_b14_the_pod_waits_longer_than_the_launcher(backend: str) -> None:
    trainer = by_component(render(make("eks-p5", backend)))["trainer"]
    inner = trainer.option("--stop-grace")
    assert inner is not None and float(inner) + 5 <= trainer.pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_b35_names_exist_before_pods_are_ready(backend: str) -> None:
    rendered = render(make(backend=backend))
    for thing in rendered:
        if thing["kind"] == "Service":
            assert thing["spec"]["clusterIP"] == "None"
            assert thing["spec"]["publishNotReadyAddresses"] is True
        if thing["kind"] in ("JobSet", "TrainingRuntime"):
            spec = thing["spec"] if thing["kind"] == "JobSet" else thing["spec"]["template"]["spec"]
            assert spec["network"]["publishNotReadyAddresses"] is True
    assert any(thing["kind"] in ("Service", "JobSet", "TrainingRuntime") for thing in rendered)


def test_b37_and_c44_the_coordinator_has_a_pod_a_name_and_a_life_of_its_own() -> None:
    parts = by_component(render(make("eks-p5", "jobset")))
    assert parts["coordinator"].num_pods == 1
    assert parts["trainer"].num_pods == 3  # two that train, one that waits
    assert parts["trainer"].option("--nnodes") == "2:2"
    assert parts["trainer"].option("--rdzv-endpoint") == "llama-coordinator-0-0.llama:29400"
    assert parts["coordinator"].host_names() == ["llama-coordinator-0-0.llama"]
    assert "nvidia.com/gpu" not in parts["coordinator"].pod["containers"][0]["resources"]["limits"]
    assert "tolerations" not in parts["coordinator"].pod


def test_requests_are_limits_and_devices_are_what_the_profile_says() -> None:
    container = by_component(render(make("eks-p5")))["trainer"].pod["containers"][0]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == ("8", "32", "5120Mi")


def test_the_policy_reaches_every_launcher_and_a_cordon_knows_the_machine() -> None:
    rendered = render(make(more="policy: {cordon_after: 3}\n"))
    data = next(thing for thing in rendered if thing["kind"] == "ConfigMap")["data"]
    assert json.loads(data["policy.json"]) == {"cordon_after": 3}
    for load in workloads(rendered):
        assert load.option("--policy") == "/etc/ridethrough/job/policy.json"
    trainer = by_component(rendered)["trainer"]
    assert trainer.option("--node-name") == "$(NODE_NAME)"
    variables = {v["name"]: v.get("valueFrom") for v in trainer.pod["containers"][0]["env"]}
    assert variables["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_the_launcher_is_pid_1_without_a_shell() -> None:
    for load in workloads(render(make())):
        assert load.command[0] == "ridethrough"
        assert "args" not in load.pod["containers"][0]


def test_fsx_is_bound_statically_and_kept() -> None:
    rendered = {thing["kind"]: thing for thing in render(make("eks-p5"))}
    volume, claim = rendered["PersistentVolume"]["spec"], rendered["PersistentVolumeClaim"]["spec"]
    assert volume["persistentVolumeReclaimPolicy"] == "Retain"
    assert volume["csi"]["driver"] == "fsx.csi.aws.com"
    assert volume["claimRef"]["name"] == rendered["PersistentVolumeClaim"]["metadata"]["name"]
    assert claim["volumeName"] == rendered["PersistentVolume"]["metadata"]["name"]
    assert claim["accessModes"] == ["ReadWriteMany"] and claim["storageClassName"] == ""


def test_a_claim_of_the_user_s_is_not_made() -> None:
    spec = make(more="storage: {claim: mine, write_gb_s: 1}\n")
    rendered = render(spec)
    assert not any(thing["kind"] == "PersistentVolumeClaim" for thing in rendered)
    volumes = by_component(rendered)["trainer"].pod["volumes"]
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "mine"}} in volumes


def test_a_budget_is_made_only_where_a_standby_can_take_over() -> None:
    def budgets(standby: int) -> list[int]:
        rendered = render(make(more=f"standby: {standby}\nlimits: {{node_wait_s: 900}}\n"))
        return [thing["spec"]["minAvailable"] for thing in rendered if thing["kind"] == "PodDisruptionBudget"]

    assert budgets(0) == []
    assert budgets(1) == [2]


def test_the_token_is_in_no_file_that_render_prints() -> None:
    spec = make()
    text = to_yaml(render(spec), spec)
    assert "kind: Secret" not in text and "openssl rand" in text
    with_secret = to_yaml(render(spec, token="abc"), spec)
    assert "openssl" not in with_secret and "token: abc" in with_secret


def test_metrics_are_answered_beside_the_coordinator_to_who_knows_their_own_token() -> None:
    rendered = render(make(more="options: {monitoring: true}\n"), token="abc")
    secret = next(thing for thing in rendered if thing["kind"] == "Secret")["stringData"]
    assert len(secret["metrics"]) == 64 and secret["metrics"] != secret["token"]
    sidecar = by_component(rendered)["coordinator"].pod["initContainers"][0]
    assert sidecar["restartPolicy"] == "Always"
    monitor = next(thing for thing in rendered if thing["kind"] == "PodMonitor")["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] == sidecar["ports"][0]["name"]
    policy = next(thing for thing in rendered if thing["kind"] == "NetworkPolicy")["spec"]["ingress"]
    assert policy[1]["ports"] == [{"protocol": "TCP", "port": sidecar["ports"][0]["containerPort"]}]


def test_alerts_and_dashboard_get_their_envelopes() -> None:
    spec = make(more="options: {monitoring: true}\n")
    groups = [{"name": "r", "rules": [{"alert": "A", "expr": "up == 0", "for": "5m", "labels": {"severity": "page"}}]}]
    extras = [monitoring.alert_rules(spec, groups), monitoring.dashboard(spec, {"title": "T"})]
    assert validate_spec(spec, extras).problems == []
    assert extras[1]["metadata"]["labels"]["grafana_dashboard"] == "1"
    extras[0]["spec"]["groups"][0]["rules"][0]["expression"] = "x"
    assert [p.rule for p in validate_spec(spec, extras).problems] == ["schema"]


def test_the_longest_name_still_fits() -> None:
    spec = parse_spec(f"name: {'a' * 40}\nprofile: cpu\nnodes: 900\nstandby: 99\n")
    assert [p for p in validate_objects(render(spec)).problems if p.rule == "names"] == []
