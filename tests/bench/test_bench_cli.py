"""Bad usage of the benchmarks' commands: one line with the remedy, exit code 2, nothing started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridethrough.bench.mechanisms import MECHANISMS, WorkloadSize
from ridethrough.bench.recovery import fault_schedule, run_matrix
from ridethrough.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recovery", "--mechanisms", "magic"], "none of ridethrough"),
        (["recovery", "--faults", "rain"], "none of exception"),
        (["recovery", "--fault-at", "1:0"], "a step in 2..10"),
        (["recovery", "--fault-at", "5:9"], "a rank in 0..3"),
        (["recovery", "--peer-env", "nvrx"], "NAME=PATH"),
        (["recovery", "--mechanisms", "ridethrough-node", "--ranks", "3"], "even number"),
        (["checkpoint", "--modes", "magic"], "none of none"),
        (["checkpoint", "--compute", "hard"], "wait or busy"),
        (["checkpoint", "--windows", "3,x"], "numbers above 0"),
        (["shadow", "--script", "/nowhere/train.py"], "no such file"),
    ],
)
def test_bad_usage_says_what_to_do(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_the_lists_explain_every_name() -> None:
    for command in (["recovery", "--mechanisms", "list"], ["checkpoint", "--modes", "list"]):
        result = CliRunner().invoke(app, ["bench", *command])
        assert result.exit_code == 0
    result = CliRunner().invoke(app, ["bench", "recovery", "--mechanisms", "list"])
    assert all(name in result.output for name in MECHANISMS)


def test_one_seed_one_schedule() -> None:
    size = WorkloadSize()
    one, again = (fault_schedule(["exception", "hang"], 2, 42, size, (6, 1)) for _ in range(2))
    assert one == again and one.hash == again.hash
    assert [fault.id for fault in one.faults] == ["exception-0", "exception-1", "hang-0", "hang-1"]
    assert {(fault.step, fault.rank) for fault in one.faults} == {(6, 1)}
    assert one.hash != fault_schedule(["exception", "hang"], 2, 43, size, (6, 1)).hash
    drawn = fault_schedule(["sigkill"], 8, 42, size, None)
    assert len({(fault.step, fault.rank, fault.phase) for fault in drawn.faults}) > 3


def test_a_case_is_simulated_and_a_wrong_one_refused(tmp_path: Path) -> None:
    example = CliRunner().invoke(app, ["simulate", "--example"])
    case = json.loads(example.output)
    case["fleet"]["horizon_s"] = 7200.0
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    result = CliRunner().invoke(app, ["simulate", "--case", str(path), "--json"])
    assert result.exit_code == 0
    assert 0.9 < json.loads(result.output)["training_goodput"] <= 1
    path.write_text("{}")
    assert CliRunner().invoke(app, ["simulate", "--case", str(path)]).exit_code == 2
    assert CliRunner().invoke(app, ["simulate", "--check", str(path)]).exit_code == 2


def test_the_page_is_checked_and_made(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    options = ["bench", "page", "--from", str(tmp_path), "--out", str(out)]
    assert CliRunner().invoke(app, [*options, "--check"]).exit_code == 1
    assert CliRunner().invoke(app, options).exit_code == 0
    assert CliRunner().invoke(app, [*options, "--check"]).exit_code == 0


def test_no_mechanism_left_is_a_result_that_says_so() -> None:
    from ridethrough.bench.recovery import Matrix

    size = WorkloadSize()
    matrix = Matrix(["torchft"], ["exception"], 1, fault_schedule(["exception"], 1, 42, size, (6, 1)), size, {})
    result = run_matrix(matrix, lambda line: None)
    assert result["results"] == [] and "--peer-env torchft=PATH" in result["missing"][0]["error"]
