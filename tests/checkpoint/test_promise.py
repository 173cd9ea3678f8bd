"""What the memory tier promises, by measured times; and when a loss is a spike."""

from __future__ import annotations

from typing import Any

import pytest

from ridethrough.checkpoint.promise import MEASURED_STEPS, WARM_STEPS, Measuring, Promise, affordable_every
from ridethrough.checkpoint.spike import LossSpike


@pytest.mark.parametrize(
    ("every", "step_s", "replica_s", "steps"),
    [(1, 0.5, 0.2, 2), (1, 0.5, 4.0, 9), (5, 0.5, 4.0, 15), (1, 1.0, None, None)],
)
def test_a_lost_node_costs_the_steps_of_one_replication_and_one_more(
    every: int, step_s: float, replica_s: float | None, steps: int | None
) -> None:
    """Rule 6."""
    assert Promise(every, step_s, 0.0, replica_s).node_loss_steps == steps


def test_the_promise_is_said_in_steps_and_seconds() -> None:
    assert Promise(1, 0.1, 0.0005, 0.24).text() == (
        "memory tier: a snapshot every step holds training up 0.5 ms of 100.0 ms; a dead process costs at most 1 step, "
        "a lost node 4 steps (a replica takes 0.24 s)"
    )
    assert "every 3 steps" in (text := Promise(3, 0.1, 0.0, None).text()) and "not survived" in text


def test_the_interval_by_cost_keeps_snapshots_at_two_percent() -> None:
    assert affordable_every(0.5, 0.009) == 1
    assert affordable_every(0.5, 0.011) == 2
    assert affordable_every(0.1, 0.1) == 50


def test_steps_are_measured_without_their_snapshots_and_after_the_first_ones() -> None:
    one = Measuring()
    now, stall, found = 0.0, 0.0, []
    for number in range(40):
        found.append(one.snapshot_begins(now, stall))
        slow = 10.0 if number < WARM_STEPS else 0.0
        now, stall = now + 0.5 + slow + 0.02, stall + slow + 0.02
    (measured,) = [f for f in found if f is not None]
    assert found.index(measured) == WARM_STEPS + MEASURED_STEPS
    assert measured == pytest.approx((0.5, 0.02))


def test_a_spike_is_far_above_the_median_until_it_is_the_level() -> None:
    rule = LossSpike(3.0)
    assert not any(rule.judge(loss) for loss in (9.0, 1.0, 30.0, 1.1, 0.9, 1.0, 1.0, 1.0))
    assert rule.judge(3.5) and rule.judge(float("nan")) and not rule.judge(2.9)
    judged = [rule.judge(10.0) for _ in range(40)]
    assert judged[0] and not judged[-1]


def test_snapshots_are_taken_as_rarely_as_they_are_dear(
    job: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ridethrough.checkpoint.checkpointer.affordable_every", lambda *_measured: 4)
    one = job(memory="measured")
    one.checkpointer.load()
    one.run(0, 26)
    assert one.checkpointer.memory_every == 4
    figures = one.checkpointer.figures
    assert figures.held + figures.not_held < 20
    assert "a snapshot every 4 steps" in capsys.readouterr().err
    one.checkpointer.abandon()
    assert job(memory=1).checkpointer.load().step == 24
