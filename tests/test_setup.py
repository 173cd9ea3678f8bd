"""`make setup` on machines that lack something: one line that says what, and nothing made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "dirname", "cat", "cksum", "uname", "df", "awk", "mktemp", "rm", "touch", "grep", "tail", "flock")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout with a PATH of its own: `bin` has the system's tools, and no Python until a test adds one."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, checkout / name)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found:
            (tmp_path / "bin" / name).symlink_to(found)
    return tmp_path


def add(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def setup(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/setup.sh"],
        check=False,
        cwd=machine / "checkout",
        env={"PATH": str(machine / "bin"), "HOME": str(machine), "TMPDIR": str(machine), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(machine: Path, says: str, **environment: str) -> None:
    result = setup(machine, **environment)
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("setup: ") and says in last, result.stderr
    assert not (machine / "checkout" / ".venv" / ".ready").exists()


def test_no_python_and_too_old_a_python(machine: Path) -> None:
    refused(machine, "needs Python 3.10 to 3.14, found no python3")
    add(machine, "python3", '[ "$1" = --version ] && echo Python 3.8.1 && exit; exit 1')
    refused(machine, "needs Python 3.10 to 3.14, found Python 3.8.1: install one, or name it with PYTHON=")
    refused(machine, "PYTHON=python3 is no Python 3.10 to 3.14", PYTHON="python3")


def test_no_venv_module(machine: Path) -> None:
    add(machine, "python3", f'[[ "$2" == *ensurepip* ]] && exit 1; exec {sys.executable} "$@"')
    refused(machine, "python3 has no venv module: install it (Debian, Ubuntu: apt install python3-venv)")


def test_a_launcher_without_its_python_behind_it_is_passed_over(machine: Path) -> None:
    add(machine, "python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    add(machine, "python3.12", f'[[ "$2" == *ensurepip* ]] && exit 1; exec {sys.executable} "$@"')
    refused(machine, "python3.12 has no venv module")


def test_too_little_disk(machine: Path) -> None:
    (machine / "bin" / "python3").symlink_to(sys.executable)
    add(machine, "df", "echo header; echo /dev/x 9 9 2097152 9% /")
    refused(machine, "4 GB of free disk")
    assert not (machine / "checkout" / ".venv").exists()


def test_another_system_is_told_the_container(machine: Path) -> None:
    add(machine, "uname", '[ "$1" = -s ] && echo Darwin || echo arm64')
    refused(machine, "docker run --rm -it -v", GOAL="test")


def test_no_network(machine: Path) -> None:
    add(machine, "python3", f'exec {sys.executable} "$@"')
    nowhere = "http://127.0.0.1:9"
    refused(
        machine,
        "no network: the package index cannot be reached",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=f"{nowhere}/simple",
        https_proxy=nowhere,
        PIP_NO_BUILD_ISOLATION="1",
    )


def test_a_ready_environment_is_left_alone(machine: Path) -> None:
    (machine / "bin" / "python3").symlink_to(sys.executable)
    venv = machine / "checkout" / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    command = '{ cat pyproject.toml constraints.txt scripts/setup.sh && echo "   $PWD"; } | cksum'
    stamp = subprocess.run(
        ["bash", "-c", command], check=True, cwd=machine / "checkout", capture_output=True, text=True
    ).stdout
    (venv / ".ready").write_text(stamp)
    os.utime(venv / ".ready", (1, 1))
    result = setup(machine)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (venv / ".ready").stat().st_mtime > 1000
    with (machine / "checkout" / "constraints.txt").open("a") as file:
        file.write("numpy<3\n")
    add(machine, "df", "echo header; echo /dev/x 9 9 2097152 9% /")
    refused_now = setup(machine)
    assert refused_now.returncode == 1 and "free disk" in refused_now.stderr
