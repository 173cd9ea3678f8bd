"""The table: its page, its limits that grow, and limits inside limits (B34)."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from ridethrough.generation.limits import check_limits
from ridethrough.generation.policy import Policy, policy_table, rewrite_table

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"
ORDER = ("heartbeat_timeout_s", "collective_timeout_s", "in_process_limit_s", "stop_grace_s", "pod_grace_s")


def test_the_page_holds_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert policy_table() in page, "python -m ridethrough.generation.policy docs/policy.md brings it up to date"
    assert rewrite_table(page) == page


def test_every_setting_says_what_it_does() -> None:
    assert all(info.description for info in Policy.model_fields.values())


def test_the_defaults_are_nested() -> None:
    assert check_limits(Policy(), heartbeat_s=0.5, pod_grace_s=30.0) == []


def test_wrong_pairs_are_named_with_both_values() -> None:
    limits = {
        "heartbeat_timeout_s": 10.0,
        "collective_timeout_s": 5.0,
        "in_process_limit_s": 8.0,
        "stop_grace_s": 30.0,
        "pod_grace_s": 20.0,
    }
    lines = check_limits(Policy(), **limits)
    assert len(lines) == 3
    for inner, outer in (
        ("heartbeat_timeout_s (10 s)", "collective_timeout_s (5 s)"),
        ("heartbeat_timeout_s (10 s)", "in_process_limit_s (8 s)"),
        ("stop_grace_s (30 s)", "pod_grace_s (20 s)"),
    ):
        assert any(line.startswith(f"{inner} must be below {outer}") for line in lines), lines


def test_twenty_random_orders_are_refused_pair_by_pair() -> None:
    draw = random.Random(34)
    for _ in range(20):
        values = [4.0, 8.0, 16.0, 32.0, 64.0]
        draw.shuffle(values)
        limits = dict(zip(ORDER, values, strict=True))
        wrong = sum(a > b for a, b in itertools.combinations(values, 2))
        assert len(check_limits(Policy(), **limits)) == wrong, limits


def test_an_unknown_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such limit: grace"):
        check_limits(Policy(), grace=1.0)


def test_limits_grow_with_the_world_and_with_what_was_recorded() -> None:
    policy = Policy(leave_limit_s=2.0, rebuild_limit_s=30.0)
    assert policy.leave_limit(1024) == 4.0
    assert policy.rebuild_limit(1024) == 60.0
    assert policy.rebuild_limit(8, longest_s=50.0) == 200.0
