"""Every command: it is there, its help teaches and is whole at 80 columns, and wrong use costs one line and a code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ridethrough.cli.main import COMMANDS, app

# The commands that scripts rely on, and whether they take --json.
PROMISED = {
    "demo": True,
    "run": False,
    "coordinator": False,
    "train": False,
    "status": True,
    "runs ls": True,
    "runs show": True,
    "runs search": True,
    "runs compare": True,
    "runs note": True,
    "runs export": False,
    "report": False,
    "dash": False,
    "advise": True,
    "calibrate": True,
    "schema": True,
    "faults plan": True,
    "faults kinds": True,
    "chaos run": True,
    "ckpt ls": True,
    "ckpt show": True,
    "ckpt verify": True,
    "ckpt prune": True,
    "ckpt export": True,
    "bench recovery": True,
    "bench checkpoint": True,
    "bench shadow": True,
    "bench memory": True,
    "simulate": True,
    "data prepare": False,
    "k8s init": False,
    "k8s render": False,
    "k8s validate": True,
    "k8s submit": False,
    "k8s status": True,
    "k8s logs": False,
    "k8s collect": False,
    "k8s delete": False,
    "k8s doctor": True,
    "exit-codes": True,
    "env": True,
}


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name, one in below.items():
        yield from leaves(one, f"{path} {name}")


FOUND = dict(
    leaf
    for name, (module, _) in COMMANDS.items()
    for leaf in leaves(typer.main.get_command(importlib.import_module(module).app), name)
)


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_what_is_promised_is_there() -> None:
    assert PROMISED.keys() <= FOUND.keys()
    takes_json = {name: any("--json" in p.opts for p in FOUND[name].params) for name in PROMISED}
    assert takes_json == PROMISED


@pytest.mark.parametrize("name", FOUND)
def test_help_teaches_and_is_whole_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = call(*name.split(), "--help").stdout
    lines = text.splitlines()
    assert text == call(*name.split(), "-h").stdout
    examples = [line for line in lines if line.startswith("    ") and f"ridethrough {name}" in line]
    assert examples, "no example"
    parameters = [p for p in FOUND[name].params if not getattr(p, "hidden", False)]
    words = set(text.replace(",", " ").split())
    assert {option for p in parameters for option in p.opts if option.startswith("-")} <= words
    assert all(len(line) <= 80 for line in lines if "ridethrough " not in line and " --" not in line)


MISSING_RUN = ["no-such-run", "--runs", "{runs}"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["status", *MISSING_RUN], "no run"),
        (["runs", "ls", "--runs", "/nowhere"], "/nowhere"),
        (["runs", "show", *MISSING_RUN], "no run"),
        (["runs", "search", "word", "--runs", "/nowhere"], "/nowhere"),
        (["runs", "compare", "a", "b", "--runs", "{runs}"], "no run"),
        (["runs", "note", *MISSING_RUN], "no run"),
        (["runs", "export", "--to", "x.txt", "--runs", "{runs}"], "x.txt"),
        (["runs", "otel", *MISSING_RUN], "no run"),
        (["runs", "compact", *MISSING_RUN], "no run"),
        (["report", *MISSING_RUN], "no run"),
        (["advise", *MISSING_RUN], "no run"),
        (["alert", *MISSING_RUN], "no run"),
        (["metrics", "--runs", "/nowhere"], "/nowhere"),
        (["dash", "/nowhere"], "/nowhere"),
        (["calibrate", *MISSING_RUN], "no run"),
        (["calibrate", "begun", "--runs", "{runs}"], "begun"),
        (["ckpt", "ls", "/nowhere"], "/nowhere"),
        (["ckpt", "show", "/nowhere"], "/nowhere"),
        (["ckpt", "verify", "/nowhere"], "/nowhere"),
        (["ckpt", "prune", "/nowhere"], "/nowhere"),
        (["ckpt", "export", "/nowhere", "x.safetensors"], "/nowhere"),
        (["run"], "which script?"),
        (["run", "no-such.py"], "no-such.py: no such script"),
        (["run", "--nproc-per-node", "many", "{script}"], "--nproc-per-node many"),
        (["run", "--nnodes", "2", "{script}"], "--rdzv-endpoint HOST:PORT and --token-file FILE"),
        (["run", "--token-file", "/nowhere", "{script}"], "/nowhere"),
        (["run", "--policy", "/nowhere", "{script}"], "--policy /nowhere cannot be read"),
        (["run", "--policy", "{misspelt}", "{script}"], "no setting eval_limits, perhaps eval_limit_s"),
        (["run", "--policy", "{negative}", "{script}"], "eval_limit_s is -1"),
        (["coordinator"], "--token-file FILE"),
        (["coordinator", "--bind", "x:y:z"], "--bind"),
        (["train", "--preset", "huge"], "--preset huge"),
        (["demo", "--preset", "huge"], "--preset huge"),
        (["demo", "--fault-at", "rain:0:2"], "rain"),
        (["chaos", "run", "--fault-types", "rain"], "rain"),
        (["chaos", "run", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["faults", "plan", "--fault-schedule", "/nowhere"], "/nowhere"),
        (["bench", "recovery", "--mechanisms", "magic"], "magic"),
        (["bench", "shadow", "--script", "/nowhere"], "/nowhere"),
        (["simulate", "--case", "/nowhere"], "/nowhere"),
        (["simulate", "--check", "/nowhere"], "/nowhere"),
        (["data", "prepare", "--text", "/nowhere", "--out", "{runs}/tokens"], "/nowhere"),
        (["data", "prepare", "--text", "{script}", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["k8s", "init", "--profile", "abacus"], "abacus"),
        (["k8s", "render", "/nowhere.yaml"], "/nowhere.yaml"),
        (["k8s", "validate", "/nowhere.yaml"], "/nowhere.yaml"),
        (["k8s", "submit", "/nowhere.yaml"], "/nowhere.yaml"),
        (["k8s", "status", "/nowhere.yaml"], "/nowhere.yaml"),
        (["k8s", "collect", "/nowhere.yaml"], "/nowhere.yaml"),
        (["exit-codes", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["env", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["schema", "--json", "/nowhere/x.json"], "/nowhere/x.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_is_one_line_and_code_2(args: list[str], says: str, tmp_path: Path) -> None:
    places = {"runs": tmp_path / "runs", "script": tmp_path / "script.py"}
    places |= {name: tmp_path / f"{name}.json" for name in ("misspelt", "negative")}
    (places["runs"] / "begun").mkdir(parents=True)
    run = {"run_id": "begun", "config": {}, "config_hash": "", "schedule_hash": None, "command": [], "host": "h"}
    run |= {"schema": 1, "created": "2030-01-01T00:00:00Z", "versions": {}, "result": None}
    (places["runs"] / "begun" / "run.json").write_text(json.dumps(run))
    places["script"].write_text("")
    places["misspelt"].write_text('{"eval_limits": 3}')
    places["negative"].write_text('{"eval_limit_s": -1}')
    result = call(*(arg.format(**places) for arg in args))
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert says in result.stderr


@pytest.mark.parametrize("name", FOUND)
def test_an_unknown_option_is_code_2(name: str) -> None:
    result = call(*name.split(), "--bogus")
    assert result.exit_code == 2
    assert "Traceback" not in result.output and "bogus" in result.output
