"""The published recovery table as an event log: the partition gives its figures back, and shows what they imply."""

from __future__ import annotations

import pytest
from published import EVERY, FAULTS, STEPS, TABLE, WORST, Row, events

from ridethrough.ledger.incidents import incidents
from ridethrough.ledger.partition import partition


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.mechanism)
def test_the_log_gives_the_published_figures(row: Row) -> None:
    part = partition(events(row))
    assert part.training_goodput == pytest.approx(row.training, abs=1e-6)
    assert part.infrastructure_goodput == pytest.approx(row.infrastructure, abs=1e-6)
    assert part.wall_ns / 1e9 == pytest.approx(row.wall_s, abs=1e-3)
    assert part.states_ns["unattributed"] == 0
    found = incidents(events(row))
    assert len(found) == FAULTS
    assert {i.steps_lost for i in found} == {WORST}
    assert {round(i.stages_s["rebuild"], 6) for i in found} == {row.recovery_s}


def test_what_they_imply() -> None:
    """One job would have one step time and one cost of a save; the rows need three of each."""
    in_process, _, kubernetes = TABLE
    assert [round(row.step_s, 4) for row in TABLE] == [0.0596, 0.0769, 0.1209]
    assert [round(row.stall_s, 1) for row in TABLE] == [16.7, 43.1, 52.3]
    assert kubernetes.step_s > 2 * in_process.step_s
    # Even the largest rollback leaves up time unexplained in every row, so saves (or else) must have blocked training.
    for row in TABLE:
        lost_s = FAULTS * WORST * row.step_s
        assert (row.infrastructure - row.training) * row.wall_s > 1.3 * lost_s
    # With one step time, that of the first row, the last row's productive time would be half of what it says.
    assert STEPS * in_process.step_s / kubernetes.wall_s == pytest.approx(0.0567, abs=1e-4)
    assert STEPS % EVERY == 0
