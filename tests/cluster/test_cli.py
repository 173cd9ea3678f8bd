"""The commands as a user types them, against a kubeconfig that names the cluster in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ridethrough.cli.k8s import app

runner = CliRunner()


def k8s(*words: str) -> Any:
    return runner.invoke(app, list(words))


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(k8s("init", "--profile", "cpu", "--name", "llama").stdout)
    return str(path)


@pytest.fixture
def kubeconfig(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "secret-of-the-user"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    return cluster


def test_init_validate_render(job: str) -> None:
    checked = k8s("validate", job)
    assert checked.exit_code == 0 and checked.stdout.endswith("no problems\n")
    text = k8s("render", job).stdout
    assert [thing["kind"] for thing in yaml.safe_load_all(text)][-1] == "JobSet"


def test_validate_reads_rendered_objects_and_names_what_is_wrong(job: str, tmp_path: Path) -> None:
    path = tmp_path / "objects.yaml"
    path.write_text(k8s("render", job).stdout.replace("restartPolicy: Never", "restartPolicy: OnFailure"))
    result = k8s("validate", str(path), "--json")
    assert result.exit_code == 2
    problems = json.loads(result.stdout)["problems"]
    assert {problem["rule"] for problem in problems} == {"restart-policy"}


def test_b14_a_grace_that_does_not_fit_names_both(job: str) -> None:
    with Path(job).open("a") as file:
        file.write("\n")
    text = Path(job).read_text().replace("  # pod_grace_s: 60", "  stop_grace_s: 10\n  pod_grace_s: 8  #")
    Path(job).write_text(text)
    result = k8s("validate", job)
    assert result.exit_code == 2
    assert "stop_grace_s 10" in result.stdout and "pod_grace_s 8" in result.stdout


def test_mistakes_are_usage_errors(tmp_path: Path) -> None:
    assert k8s("init", "--profile", "tpu").exit_code == 2
    assert k8s("validate", str(tmp_path / "none.yaml")).exit_code == 2
    (tmp_path / "bad.yaml").write_text("name: a\nprofile: cpu\nnods: 2\n")
    result = k8s("render", str(tmp_path / "bad.yaml"))
    assert result.exit_code == 2
    assert "bad.yaml: nods: no such field" in result.output


def test_a_job_s_life(kubeconfig: Any, job: str) -> None:
    assert k8s("submit", job, "--dry-run").exit_code == 0
    assert kubeconfig.objects == {}
    assert k8s("submit", job).exit_code == 0
    kubeconfig.pod("llama-trainer-0-0-a", "trainer", index=0)
    kubeconfig.logs = {"llama-trainer-0-0-a": ["[rank0] step 1", "[rank1] step 1"]}
    status = json.loads(k8s("status", "llama", "--json").stdout)
    assert (status["phase"], status["backend"]) == ("running", "jobset")
    assert "llama-trainer-0-0-a" in k8s("status", job).stdout
    assert k8s("logs", job, "--rank", "1").stdout == "[rank1] step 1\n"
    assert k8s("logs", job).stdout.startswith("llama-trainer-0-0-a: [rank0]")
    kubeconfig.objects.pop(("pods", "default", "llama-trainer-0-0-a"))
    assert k8s("delete", job).exit_code == 0
    gone = k8s("status", "llama")
    assert gone.exit_code == 1 and "missing" in gone.stdout


@pytest.mark.parametrize(("kind", "pod_code", "code"), [("Completed", 0, 0), ("Failed", 83, 83), ("Failed", None, 1)])
def test_wait_ends_with_the_launcher_s_code(kubeconfig: Any, kind: str, pod_code: int | None, code: int) -> None:
    conditions = [{"type": kind, "status": "True"}]
    kubeconfig.put("jobsets", {"kind": "JobSet", "metadata": {"name": "llama"}, "status": {"conditions": conditions}})
    if pod_code is not None:
        kubeconfig.pod("llama-trainer-0-0-a", "trainer", "Failed", index=0, exit_code=pod_code)
    assert k8s("status", "llama", "--wait").exit_code == code


def test_what_validate_refuses_is_not_sent(kubeconfig: Any, job: str) -> None:
    Path(job).write_text(Path(job).read_text().replace('memory: "3Gi"', 'memory: "1Gi"'))
    result = k8s("submit", job)
    assert result.exit_code == 2 and "resources.memory" in result.output
    assert kubeconfig.requests == []


def test_a_refusal_of_the_cluster_is_one_line(kubeconfig: Any, job: str) -> None:
    kubeconfig.fail("POST", "/jobsets", status=403)
    result = k8s("submit", job)
    assert result.exit_code == 1
    assert "ridethrough: POST JobSet/llama: forbidden" in result.output
    assert kubeconfig.objects == {}


def test_doctor(kubeconfig: Any, job: str) -> None:
    result = k8s("doctor", job)
    assert result.exit_code == 1 and "install JobSet" in result.stdout
    found = json.loads(k8s("doctor", "--json").stdout)
    assert {"item", "verdict", "detail", "needed"} == set(found[0])


def test_without_a_cluster_one_line_says_so(job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    result = k8s("status", job)
    assert result.exit_code == 1
    assert "no cluster is configured" in result.output and "update-kubeconfig" in result.output
    tried = k8s("submit", job, "--dry-run")
    assert tried.exit_code == 0
    assert "JobSet/llama would be made" in tried.output and "no cluster is configured" in tried.output
    assert k8s("submit", job).exit_code == 1


def test_init_and_render_import_neither_torch_nor_the_client(job: str) -> None:
    code = (
        "import sys; from ridethrough.cli.k8s import app; from typer.testing import CliRunner;"
        f"r = CliRunner().invoke(app, ['validate', {job!r}]); assert r.exit_code == 0, r.output;"
        "print([m for m in ('torch', 'kubernetes') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["run", "coordinator", "dash"])
def test_pods_use_options_that_the_commands_have(command: str) -> None:
    from importlib import import_module

    import typer.main

    from ridethrough.cluster.reading import parse_spec
    from ridethrough.cluster.render import render
    from ridethrough.cluster.workloads import workloads

    spec = parse_spec(
        "name: a\nprofile: cpu\nscript: [SCRIPT]\nfaults: {count: 1, steps: 9}\noptions: {monitoring: true}\n"
    )
    known = {
        word
        for parameter in typer.main.get_command(import_module(f"ridethrough.cli.{command}").app).params
        for word in [*parameter.opts, *parameter.secondary_opts]
    }
    lines = [c["command"] for load in workloads(render(spec)) for c in load.containers if c["command"][1] == command]
    assert lines
    for words in lines:
        assert {word for word in words if word.startswith("--")} <= known
