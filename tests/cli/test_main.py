"""The command line itself: fast, lazy, and honest about bad usage."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ridethrough.cli.json_option import with_json_value
from ridethrough.cli.main import COMMANDS, app
from ridethrough.generation.exit_codes import EXIT_CODES, ExitCode, describe
from ridethrough.version import __version__


def imported_by(code: str) -> set[str]:
    """Top-level modules loaded by running `code` in a fresh interpreter."""
    show = "import sys; print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", f"{code}; {show}"], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["ridethrough", "ridethrough.cli.main", "ridethrough.faults.schedule", "ridethrough.faults.injector"]
    + ["ridethrough.ledger", "ridethrough.generation", "ridethrough.report.environment", "ridethrough.cli.faults"],
)
def test_importing_does_not_import_torch(module: str) -> None:
    assert "torch" not in imported_by(f"import {module}")


def test_listing_the_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ridethrough.cli.main import COMMANDS, app; "
        "result = CliRunner().invoke(app, ['--help']); assert result.exit_code == 0; "
        "assert all(name in result.output for name in COMMANDS); "
        "print([m for m, _ in COMMANDS.values() if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_explains_itself(name: str) -> None:
    assert importlib.util.find_spec(COMMANDS[name][0]) is not None
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--install-completion" not in result.output
    assert f"ridethrough {name}" in result.output or f"root {name}" in result.output


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x", "a b"])
@pytest.mark.parametrize("command", ["run", "train", "coordinator", "demo"])
def test_an_id_that_is_no_folder_name_is_refused_at_once(command: str, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    script = [str(tmp_path / "a.py")] if command == "run" else []
    folder = "--out" if command == "demo" else "--runs"
    result = CliRunner().invoke(app, [command, folder, str(tmp_path / "runs"), f"--run-id={run_id}", *script])
    assert result.exit_code == ExitCode.USAGE
    assert f"run id {run_id!r} is not usable as a folder: use letters" in result.stderr
    assert not (tmp_path / "runs").exists()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command and its help text, groups opened."""
    yield path, command.help or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def test_each_example_in_a_help_text_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    checked = 0
    for top, (module, _) in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        for path, text in commands(command, (top,)):
            examples = [line.strip() for line in text.splitlines() if line.startswith("    ridethrough ")]
            shown = CliRunner().invoke(app, [*path, "--help"]).output if examples else ""
            assert set(examples) <= {line.strip() for line in shown.splitlines()}, path
            checked += len(examples)
    assert checked > 25


def test_version_and_module_entry() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"ridethrough {__version__}\n"
    answer = subprocess.run(
        [sys.executable, "-m", "ridethrough", "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout == f"ridethrough {__version__}\n"


@pytest.mark.parametrize(
    "args", [["bogus"], ["faults", "bogus"], ["env", "--bogus"], ["faults", "plan", "--steps", "x"]]
)
def test_bad_usage_is_code_2(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "bogus" in result.stderr or "--steps" in result.stderr


def test_json_may_stand_alone_anywhere_but_not_past_a_double_dash() -> None:
    assert with_json_value(["--json"]) == ["--json=-"]
    assert with_json_value(["--json", "--steps", "3"]) == ["--json=-", "--steps", "3"]
    assert with_json_value(["--json", "f", "--json=g"]) == ["--json", "f", "--json=g"]
    assert with_json_value(["--json", "-"]) == ["--json", "-"]
    assert with_json_value(["a", "--", "--json"]) == ["a", "--", "--json"]


def test_exit_codes_have_one_row_each() -> None:
    rows = json.loads(CliRunner().invoke(app, ["exit-codes", "--json"]).stdout)
    assert [row["code"] for row in rows] == [str(int(code)) for code in ExitCode] + ["128 + n"]
    assert [row["name"] for row in rows[:-1]] == [code.name.lower() for code in ExitCode]
    assert {row["code"]: row["retry"] for row in rows}["80"] == "yes, on another node"
    assert len(EXIT_CODES) == len(ExitCode) + 1
    assert [describe(81), describe(137), describe(17), describe(250)] == [
        "no progress",
        "ended by SIGKILL",
        "exit code 17",
        "exit code 250",
    ]


def test_env_names_versions_machine_limits_and_gpus() -> None:
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    assert list(found) == ["versions", "machine", "limits", "gpus"]
    assert found["versions"]["ridethrough"] == __version__
    assert found["versions"]["torch"].startswith("2.")
    assert found["machine"]["memory_bytes"] > 1 << 28
    assert "machine.memory_bytes" in CliRunner().invoke(app, ["env"]).stdout


def test_the_documentation_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {row.code} | {row.meaning} | {row.retry} |" for row in EXIT_CODES]
