"""The rooms keep their order: a room imports only rooms below it, and no file is a drawer for odds and ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ridethrough"

LEVELS = (
    ("ledger",),
    ("generation",),
    ("checkpoint", "health"),
    ("restart", "launch"),
    ("train", "faults"),
    ("report", "cluster"),
    ("bench",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
DRAWERS = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "assembly", "base", "core"}


def rooms_imported(source: str, package: str) -> Iterator[tuple[str, int]]:
    """(room, line) of each import of the package anywhere in a file, `TYPE_CHECKING` and functions included."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            names = [module] if module != "ridethrough" else [f"ridethrough.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ridethrough" and len(parts) > 1 and parts[1] in LEVEL:
                yield parts[1], node.lineno


@pytest.mark.parametrize("room", sorted(LEVEL))
def test_a_room_imports_only_lower_rooms(room: str) -> None:
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        package = ".".join(["ridethrough", *path.relative_to(PACKAGE).parent.parts])
        for other, line in rooms_imported(path.read_text(encoding="utf-8"), package):
            if other != room and LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {other}")
    assert wrong == []


def test_every_folder_is_a_room_with_a_level() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - {"__pycache__"} == set(LEVEL)


def test_no_file_is_a_drawer() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert names & DRAWERS == set()


def test_the_check_sees_every_way_to_import() -> None:
    source = """
import ridethrough.cli.main
from ridethrough.bench import x
from ridethrough import train
from . import schedule
from ..report import html
def f():
    from ridethrough.launch.agent import Agent
import_module("ridethrough.cluster")
"""
    found = [room for room, _ in rooms_imported(source, "ridethrough.faults")]
    assert sorted(found) == ["bench", "cli", "cluster", "faults", "launch", "report", "train"]
