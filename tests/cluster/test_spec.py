"""The job file: profiles beneath, every mistake with its place, figures that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridethrough.cluster import sizing
from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.quantity import GIB, QuantityError, parse_quantity
from ridethrough.cluster.reading import load_spec, parse_spec
from ridethrough.cluster.spec import SpecError
from ridethrough.cluster.spec_checks import check_spec
from ridethrough.cluster.template import template

CPU = "name: job\nprofile: cpu\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1Gi", GIB), ("500m", 0.5), ("1.5", 1.5), ("2e3", 2000), ("5120Mi", 5 * GIB), ("3E", 3 * 10**18), ("64", 64)],
)
def test_quantities_are_exact(text: str, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GB", "1.2.3", "one", "1gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(QuantityError, match="no quantity"):
        parse_quantity(text)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_template_is_the_profile(profile: str) -> None:
    written = parse_spec(template(profile, "job"))
    assert written == parse_spec(f"name: job\nprofile: {profile}\n")
    assert check_spec(written) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: job\n", "profile: None is none of eks-p5"),
        ("profile: cpu\n", "name: Field required"),
        (CPU + "nods: 3\n", "nods: no such field"),
        (CPU + "nodes: 0\n", "nodes: Input should be greater than or equal to 1"),
        (CPU + "name: other\n", "line 3: 'name' stands twice"),
        (CPU + "resources: {memory: 3GB}\n", "resources.memory: '3GB' is no quantity"),
        (CPU + "storage: {claim: a, storage_class: b}\n", "storage: give exactly one of claim, fsx and storage_class"),
        (CPU + "min_nodes: 9\n", "min_nodes 9 is more than nodes 2"),
        (CPU + "backend: slurm\n", "backend: Input should be 'jobset', 'job', 'trainjob' or 'hyperpod'"),
        (CPU + "policy: {cordon_aftr: 3}\n", "job: policy.cordon_aftr: Extra inputs are not permitted"),
        (CPU + "policy: {cordon_after: -1}\n", "policy.cordon_after: Input should be greater than or equal to 0"),
        (CPU + "policy: {node_wait_s: 10}\n", "policy: node_wait_s stands under limits"),
        (CPU + "placement: {priority: 10}\n", "priority needs priority_class"),
        ("name: Job_1\nprofile: cpu\n", "name: String should match pattern"),
        ("name: job\nprofile: eks-p5\nnproc_per_node: 9\n", "nproc_per_node 9 is more than resources.gpus 8"),
        ("name: [\n", "no YAML"),
        ("- a\n", "expected the fields of a job"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file or directory; `ridethrough k8s init"):
        load_spec(tmp_path / "job.yaml")


def test_the_profile_s_storage_gives_way_to_the_user_s() -> None:
    spec = parse_spec("name: job\nprofile: eks-p5\nstorage: {claim: mine}\n")
    assert (spec.storage.claim, spec.storage.fsx, spec.storage.write_gb_s) == ("mine", None, 0.24)


def test_the_last_save_decides_the_grace() -> None:
    spec = parse_spec(CPU + "state: {total_gb: 100, step_s: 4}\nstorage: {write_gb_s: 0.5}\n")
    assert sizing.flush_s(spec) == 200
    assert sizing.stop_grace_s(spec) == 254  # 4 + 1.25 * 200
    assert sizing.pod_grace_s(spec) == 259


def test_snapshots_count_as_the_pod_s_memory() -> None:
    spec = parse_spec(CPU + "state: {total_gb: 10, rank_host_gb: 1}\nresources: {shm: 1Gi}\n")
    # two ranks, seven snapshots of half the state, half a GiB for the launcher, /dev/shm
    assert sizing.pod_memory_bytes(spec) == int(2e9 + 8 * 5e9 + 0.5 * GIB + GIB)


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ("limits: {lease_s: 400}", "limits", ["below the launcher's coordinator_wait_s 120", "below node_wait_s 300"]),
        ("limits: {node_wait_s: 100}\nstandby: 0", "limits", ["node_wait_s 100", "without a standby node"]),
        ("limits: {deadline_s: 200}", "limits", ["node_wait_s 300 must be below deadline_s 200"]),
        ("limits: {stop_grace_s: 10, pod_grace_s: 8}", "grace", ["stop_grace_s 10", "pod_grace_s 8", "at least 15"]),
        ("limits: {stop_grace_s: 0.5}", "grace", ["0.5 s is less than", "give at least 2"]),
        ("resources: {memory: 1Gi}", "memory", ["1Gi is less than 3Gi", "8 snapshots"]),
        ("state: {total_gb: 2}", "storage", ["hold no four checkpoints"]),
        ("placement: {spread: required}", "storage", ["ReadWriteOnce"]),
        ("faults: {types: [earthquake]}", "faults", ["earthquake"]),
        ("faults: {count: 5, steps: 3}", "faults", ["5"]),
    ],
)
def test_a_spec_that_cannot_work_is_refused(change: str, rule: str, words: list[str]) -> None:
    problems = check_spec(parse_spec(CPU + change + "\n"))
    said = [problem.message for problem in problems if problem.rule == rule]
    assert said, problems
    for word in words:
        assert any(word in message for message in said), said


@pytest.mark.parametrize(
    ("change", "field"),
    [("cpu: '200'", "cpu"), ("memory: 2100Gi", "memory"), ("efa: 33", "efa"), ("gpus: 16", "gpus")],
)
def test_a_pod_fits_its_node(change: str, field: str) -> None:
    problems = check_spec(parse_spec(f"name: job\nprofile: eks-p5\nresources: {{{change}}}\n"))
    assert [problem.rule for problem in problems] == ["node"]
    assert field in problems[0].where
