"""`--policy FILE`: limits in the wrong order are told before anything starts (B34)."""

from __future__ import annotations

import itertools
import json
import random
import socket
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ridethrough.cli import coordinator, run, train

ORDER = ("heartbeat_timeout_s", "collective_timeout_s", "in_process_limit_s", "stop_grace_s", "pod_grace_s")


def told(folder: Path, policy: dict[str, Any], *options: str) -> tuple[list[str], str]:
    """The warnings of `ridethrough run`, which ends at once: it is given a fault that is none."""
    file = folder / "policy.json"
    file.write_text(json.dumps(policy))
    script = folder / "script.py"
    script.write_text("")
    result = CliRunner().invoke(run.app, ["--policy", str(file), "--fault-at", "x", *options, str(script)])
    assert result.exit_code == 2
    return [line for line in result.stderr.splitlines() if "warning: " in line], result.stderr


def settings(values: dict[str, float]) -> dict[str, Any]:
    """As the file holds them: what the launcher keeps itself, and what is around it."""
    around = {name: value for name, value in values.items() if name != "stop_grace_s"}
    return {"stop_grace_s": values["stop_grace_s"], "around": around}


def test_b34_each_wrong_pair_is_told_with_both_names_and_values(tmp_path: Path) -> None:
    lines, _ = told(tmp_path, settings(dict(zip(ORDER, (10.0, 5.0, 8.0, 30.0, 20.0), strict=True))))
    assert [line.partition("warning: ")[2].partition(":")[0] for line in lines] == [
        "heartbeat_timeout_s (10 s) must be below collective_timeout_s (5 s)",
        "heartbeat_timeout_s (10 s) must be below in_process_limit_s (8 s)",
        "stop_grace_s (30 s) must be below pod_grace_s (20 s)",
    ]
    assert told(tmp_path, settings(dict(zip(ORDER, (5.0, 8.0, 10.0, 20.0, 30.0), strict=True))))[0] == []


def test_b34_twenty_random_orders(tmp_path: Path) -> None:
    draw = random.Random(34)
    for _ in range(20):
        values = [4.0, 8.0, 16.0, 32.0, 64.0]
        draw.shuffle(values)
        wrong = sum(a > b for a, b in itertools.combinations(values, 2))
        assert len(told(tmp_path, settings(dict(zip(ORDER, values, strict=True))))[0]) == wrong


def test_an_option_of_the_command_line_counts_too(tmp_path: Path) -> None:
    assert told(tmp_path, {})[0] == []
    assert "heartbeat_s (1 s) must be below lease_s (0.5 s)" in told(tmp_path, {}, "--lease", "0.5")[0][0]


def test_what_is_around_has_a_name_and_seconds(tmp_path: Path) -> None:
    assert "no such limit: pod_s; known are" in told(tmp_path, {"around": {"pod_s": 3}})[1]
    assert "give seconds by name" in told(tmp_path, {"around": {"pod_grace_s": "long"}})[1]


def test_train_looks_at_its_limits_too() -> None:
    result = CliRunner().invoke(train.app, ["--stop-grace", "1.5", "--preset", "tiny", "--fault-at", "x"])
    assert result.exit_code == 2
    assert "warning: leave_limit_s (2 s) must be below stop_grace_s (1.5 s)" in result.stderr


def test_the_coordinator_looks_at_its_limits_too(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--stop-grace", "1.5", "--token-file", str(token), "--bind", bind, "--runs", str(tmp_path)]
        result = CliRunner().invoke(coordinator.app, options)
    assert result.exit_code == 2
    assert "warning: leave_limit_s (2 s) must be below stop_grace_s (1.5 s)" in result.stderr
