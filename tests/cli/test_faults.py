"""`ridethrough faults` as a user types it: JSON, both spellings, one line and code 2 for bad usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ridethrough.cli.main import app
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.schedule import Schedule, plan


def call(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_plan_prints_the_schedule_of_its_arguments_and_nothing_else() -> None:
    result = call("faults", "plan", "--json", "--fault-count", "3", "--steps", "50", "--ranks", "8")
    assert result.exit_code == 0
    expected = plan(42, 3, ["exception", "hang", "sigkill"], None, steps=50, world_size=8)
    assert json.loads(result.stdout) == expected.as_json()


def test_both_spellings_and_all_options_mean_the_same() -> None:
    dashed = ["--fault-count=4", "--fault-seed=7", "--fault-types=exit,hang", "--fault-type-weights=1,3"]
    dashed += ["--fault-phases=data,eval", "--fault-at-once=2", "--json"]
    lined = [word.replace("-", "_").replace("__", "--", 1) if word != "--json" else word for word in dashed]
    first, second = call("faults", "plan", *dashed), call("faults", "plan", *lined)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout
    expected = plan(7, 4, ["exit", "hang"], [1, 3], 200, 4, ["data", "eval"], at_once=2)
    assert json.loads(first.stdout)["hash"] == expected.hash


def test_table_ends_with_seed_and_hash() -> None:
    result = call("faults", "plan")
    schedule = plan(42, 5, ["exception", "hang", "sigkill"], None, steps=200, world_size=4)
    assert result.stdout.splitlines()[-1] == f"5 faults, seed 42, schedule hash {schedule.hash}"


def test_json_to_a_file_can_be_played_back(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    assert call("faults", "plan", "--fault-seed", "9", "--json", str(path)).stdout == ""
    again = call("faults", "plan", "--fault-schedule", str(path), "--json")
    assert json.loads(again.stdout) == Schedule.load(path).as_json() == json.loads(path.read_text())
    small = call("faults", "plan", "--fault-schedule", str(path), "--steps", "3")
    assert small.exit_code == 2 and "this job has 4 ranks and 3 steps" in small.stderr


def test_faults_by_hand() -> None:
    result = call("faults", "plan", "--fault-at", "exception:0:7", "--fault_at", "hang_lock:-1:12:backward", "--json")
    faults = json.loads(result.stdout)["faults"]
    assert [(f["kind"], f["rank"], f["step"], f["phase"]) for f in faults] == [
        ("exception", 0, 7, "forward"),
        ("hang_lock", 3, 12, "backward"),
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--fault-count", "10", "--steps", "10"], "do not fit into 10 steps"),
        (["--fault-types", "exception,hang", "--fault-type-weights", "1"], "give one weight per type"),
        (["--fault-types", "exception", "--fault-type-weights", "x"], "give numbers, like"),
        (["--fault-types", "flood"], "choose among corrupt_save, cut_network"),
        (["--fault-types", ""], "no fault types"),
        (["--fault-phases", "lunch"], "choose among step, data"),
        (["--fault-at", "exception"], "write KIND:RANK:STEP"),
        (["--fault-schedule", "/none.json"], "cannot be read"),
        (["--json", "/nowhere/x.json"], "give a file in a folder that exists"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(args: list[str], says: str) -> None:
    result = call("faults", "plan", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and says in result.stderr


def test_kinds_lists_the_registry() -> None:
    rows = json.loads(call("faults", "kinds", "--json").stdout)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert {row["class"] for row in rows} == {
        *("exception", "hang", "sigkill", "sigsegv", "signal", "exit", "oom", "gpu", "node_loss", "corruption"),
        None,
    }
    table = call("faults", "kinds").stdout
    assert all(name in table for name in KINDS)
