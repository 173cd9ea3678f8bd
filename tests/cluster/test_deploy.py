"""deploy/: what can be known about it without an account: files parsed, scripts run with stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.schemas import check_schemas, versions

DEPLOY = Path(__file__).parents[2] / "deploy"
TERRAFORM = DEPLOY / "eks" / "terraform"
FILES = sorted(TERRAFORM.glob("*.tf"))


def blocks() -> list[tuple[str, str, str, Any]]:
    """(kind, type, name, body) of every block of the module; type is empty where a block has one label."""
    found = []
    for path in FILES:
        with path.open() as file:
            for kind, entries in hcl2.load(file).items():
                for entry in entries if isinstance(entries, list) else []:
                    for first, body in entry.items():
                        first = first.strip('"')
                        if kind in ("resource", "data"):
                            for name, inner in body.items():
                                if not name.startswith("__"):
                                    found.append((kind, first, name.strip('"'), inner))
                        elif not first.startswith("__"):
                            found.append((kind, "", first, body))
    return found


def text() -> str:
    return "\n".join(re.sub(r"#.*", "", path.read_text()) for path in FILES)


def resource(kind: str, name: str) -> Any:
    return next(body for what, type_, own, body in blocks() if (what, type_, own) == ("resource", kind, name))


def test_every_file_parses() -> None:
    assert len(FILES) >= 6
    for path in FILES:
        with path.open() as file:
            assert hcl2.load(file), path


def test_every_reference_has_its_declaration() -> None:
    declared = {f"{type_}.{name}" for kind, type_, name, _ in blocks() if kind == "resource"}
    data = {f"data.{type_}.{name}" for kind, type_, name, _ in blocks() if kind == "data"}
    used = set(re.findall(r"(?<![\w.\"/])(aws_\w+\.\w+)", text()))
    assert {name for name in used if f"data.{name}" not in data} <= declared
    assert set(re.findall(r"(data\.aws_\w+\.\w+)", text())) <= data


def test_every_variable_is_declared_and_used() -> None:
    declared = {name for kind, _, name, _ in blocks() if kind == "variable"}
    assert set(re.findall(r"\bvar\.(\w+)", text())) == declared
    local = set(re.findall(r"\blocal\.(\w+)", text()))
    assert all(re.search(rf"^\s+{name}\s*=", text(), re.MULTILINE) for name in local)


def test_gpus_and_file_system_share_a_zone_and_a_placement_group() -> None:
    group, lustre = resource("aws_autoscaling_group", "gpu"), resource("aws_fsx_lustre_file_system", "shared")
    assert "aws_subnet.private[0].id" in str(group["vpc_zone_identifier"])
    assert "aws_subnet.private[0].id" in str(lustre["subnet_ids"])
    assert "cluster" in str(resource("aws_placement_group", "gpu")["strategy"])
    assert group["desired_capacity"] == 0 and group["min_size"] == 0


def test_the_defaults_are_the_profile_eks_p5() -> None:
    node = PROFILES["eks-p5"].node
    assert node is not None
    variables = (TERRAFORM / "variables.tf").read_text()
    assert f'instance_type = "{node.name}"' in variables
    assert f"efa_cards     = {node.efa}" in variables
    assert 'deployment = "SCRATCH_2"' in variables and "size_gb    = 1200" in variables
    eksctl = yaml.safe_load((DEPLOY / "eks" / "cluster.yaml").read_text())
    assert eksctl["nodeGroups"][0]["instanceType"] == node.name


def test_a_capacity_block_is_left_before_ec2_takes_it() -> None:
    minutes = re.search(r'timeadd\(var\.capacity_block\.end_time, "-(\d+)m"\)', text())
    assert minutes is not None and int(minutes[1]) > 30


def test_nothing_is_open_to_the_internet_and_instances_use_session_tokens() -> None:
    ingress = [body for kind, type_, _, body in blocks() if type_ == "aws_vpc_security_group_ingress_rule"]
    assert ingress and all("referenced_security_group_id" in body and "cidr_ipv4" not in body for body in ingress)
    assert text().count("http_tokens") == text().count('"required"') == 2


def test_taints_and_labels_meet_those_of_the_pods() -> None:
    defaults = PROFILES["eks-p5"].defaults["placement"]
    assert f"--register-with-taints={defaults['tolerate'][0]}=" in text()
    assert '"ridethrough/role" = "system"' in text()
    assert defaults["coordinator_node_selector"] == {"ridethrough/role": "system"}
    eksctl = yaml.safe_load((DEPLOY / "eks" / "cluster.yaml").read_text())
    assert eksctl["managedNodeGroups"][0]["labels"] == defaults["coordinator_node_selector"]
    assert [taint["key"] for taint in eksctl["nodeGroups"][0]["taints"]] == defaults["tolerate"]


def test_the_eksctl_file_names_known_things_only() -> None:
    config = yaml.safe_load((DEPLOY / "eks" / "cluster.yaml").read_text())
    known = {"apiVersion", "kind", "metadata", "availabilityZones", "iam", "addonsConfig", "addons"}
    assert set(config) == known | {"managedNodeGroups", "nodeGroups"}
    assert config["apiVersion"] == "eksctl.io/v1alpha5" and config["kind"] == "ClusterConfig"
    group = config["nodeGroups"][0]
    assert group["efaEnabled"] and len(group["availabilityZones"]) == 1 and group["desiredCapacity"] == 0
    assert group["availabilityZones"][0] in config["availabilityZones"]
    assert tuple(map(int, config["metadata"]["version"].split("."))) >= (1, 30)


def test_manifests_are_valid_for_every_version() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "eks" / "prepare-volume.yaml").read_text()))
    assert check_schemas(documents, versions()) == []


@pytest.mark.parametrize("script", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


# --- teardown ---


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which the tools write down how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("ridethrough", "aws", "terraform"):
        (folder / tool).write_text(
            "#!/bin/bash\n"
            f'echo "{tool} $*" >> "{tmp_path}/calls"\n'
            'case "$*" in *"output -raw"*) echo gpu-nodes ;; *describe-auto-scaling*) echo 0 ;; esac\n'
            f'[ "{tool} $1 $2" != "$FAIL" ]\n'
        )
        (folder / tool).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "FAIL": "nothing"}


def teardown(
    environment: dict[str, str], tmp_path: Path, *words: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(
        [str(DEPLOY / "eks" / "teardown.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return done, [call for call in calls if " output " not in call]


def test_teardown_keeps_the_order(stand_ins: dict[str, str], tmp_path: Path) -> None:
    done, calls = teardown(stand_ins, tmp_path, "job.yaml", "--yes")
    assert done.returncode == 0, done.stderr
    words = ("collect", "k8s delete", "--with-claim", "update-auto", "describe-auto", "fsx", "ecr", "destroy")
    places = [next(i for i, call in enumerate(calls) if word in call) for word in words[:-1]]
    assert places == sorted(places)
    assert calls[-1].endswith("destroy -auto-approve")
    assert any("--auto-scaling-group-name gpu-nodes --min-size 0 --desired-capacity 0" in call for call in calls)


def test_teardown_without_yes_does_nothing(stand_ins: dict[str, str], tmp_path: Path) -> None:
    done, calls = teardown(stand_ins, tmp_path, "job.yaml")
    assert done.returncode == 0 and calls == []
    assert "nothing was done; add --yes" in done.stdout


def test_teardown_stops_at_the_first_failure(stand_ins: dict[str, str], tmp_path: Path) -> None:
    done, calls = teardown(stand_ins | {"FAIL": "ridethrough k8s collect"}, tmp_path, "job.yaml", "--yes")
    assert done.returncode != 0
    assert calls == ["ridethrough k8s collect job.yaml --out results"], "without results nothing is deleted"


def test_teardown_of_the_nodes_alone_keeps_the_data(stand_ins: dict[str, str], tmp_path: Path) -> None:
    done, calls = teardown(stand_ins, tmp_path, "job.yaml", "--yes", "--nodes-only")
    assert done.returncode == 0
    assert not any("destroy" in call or "--with-claim" in call for call in calls)


# --- images ---


def containerfile() -> list[str]:
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text()).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def stages() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in containerfile():
        if line.startswith("FROM "):
            name = line.split(" AS ")[1].strip()
            out[name] = [line]
        elif out:
            out[list(out)[-1]].append(line)
    return out


def test_images_are_built_in_stages_from_a_pinned_base() -> None:
    assert list(stages()) == ["wheel", "common", "cpu", "gpu", "efa"]
    base = next(line for line in containerfile() if line.startswith("ARG BASE="))
    assert re.fullmatch(r"ARG BASE=\S+:\d+\.\d+\.\d+-\S+", base)
    for lines in stages().values():
        assert re.match(r"FROM (\$\{BASE\}|common|gpu) AS ", lines[0])


@pytest.mark.parametrize("target", ["cpu", "gpu", "efa"])
def test_each_image_is_checked_as_the_user_that_runs_it(target: str) -> None:
    lines = stages()[target]
    user = lines.index("USER 1000:1000")
    check = next(i for i, line in enumerate(lines) if f"check_image.py {target}" in line)
    assert user < check
    assert all("|| true" not in line for line in lines)


def test_what_is_fetched_is_pinned_and_verified() -> None:
    whole = "\n".join(containerfile())
    assert re.search(r"ARG EFA_VERSION=\d+\.\d+\.\d+", whole) and "gpg --status-fd 1 --verify" in whole
    assert 'ARG EFA_URL=""' in containerfile() and "://" not in whole, "whoever builds says where from"
    for line in containerfile():
        if "pip install" in line:
            assert "constraints.txt" in line or re.search(r"==\d", line), line
    assert not re.search(r"^ADD ", whole, re.MULTILINE)
    assert not re.search(r"(?i)(password|secret|token|aws_access_key)", whole)
    addons = (DEPLOY / "eks" / "addons.sh").read_text()
    assert re.findall(r":-(v?\d+\.\d+\.\d+)\}", addons), addons


def test_the_build_context_holds_only_what_is_copied() -> None:
    ignore = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert ignore[0] == "*"
    copied = [word for line in containerfile() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {f"!{word}" for word in copied} == {word for word in ignore if word.startswith("!")}
    assert all((DEPLOY.parent / word).exists() for word in copied)


def test_terraform_agrees_with_its_own_format() -> None:
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("terraform is not installed")
    subprocess.run([terraform, "fmt", "-check", "-recursive", str(TERRAFORM)], check=True, capture_output=True)
