"""What a coordinator leaves in the run's folder for the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ridethrough.launch.epoch import ClaimLost, check_claim, claim_epoch, forget_planned, note_planned, planned_before


def test_each_claim_is_above_the_one_before(tmp_path: Path) -> None:
    assert [claim_epoch(tmp_path) for _ in range(3)] == [0, 1, 2]
    check_claim(tmp_path, 2)
    with pytest.raises(ClaimLost, match=f"epoch 2 has taken over from epoch 1: process {os.getpid()} on"):
        check_claim(tmp_path, 1)


def test_the_last_plan_is_known_until_the_job_has_ended(tmp_path: Path) -> None:
    first = claim_epoch(tmp_path)
    assert planned_before(tmp_path) == 0
    note_planned(tmp_path, 1)
    note_planned(tmp_path, 2)
    second = claim_epoch(tmp_path)
    assert (second, planned_before(tmp_path)) == (1, 2), "no claim by itself"
    forget_planned(tmp_path, first)
    assert planned_before(tmp_path) == 2, "the end that a deposed coordinator believes in"
    forget_planned(tmp_path, second)
    forget_planned(tmp_path, second)
    assert planned_before(tmp_path) == 0
