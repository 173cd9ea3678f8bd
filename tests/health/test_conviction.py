"""Verdicts over the ranks of several nodes, each seen by its own node's clock."""

from __future__ import annotations

from ridethrough.generation.messages import Situation
from ridethrough.health.conviction import convict


def at(step: int = 5, phase: str = "forward", begun: int = 0, *, overdue: bool = True, **fields: bool) -> Situation:
    fields = {"late": overdue, **fields}
    return Situation(step=step, phase=phase, groups={"a": begun}, overdue=overdue, **fields)


def test_nobody_is_convicted_while_nobody_is_overdue() -> None:
    assert convict({0: at(overdue=False), 1: at(begun=3, overdue=False)}) == ()


def test_the_guilty_need_not_be_the_one_that_was_suspected() -> None:
    waiting = {0: at(begun=3), 1: at(begun=3)}
    other_node = {2: at(begun=2, overdue=False, late=True), 3: at(begun=3, overdue=False, late=True)}
    assert convict(waiting | other_node) == (2,)


def test_a_rank_that_has_just_come_back_from_loading_data_is_not_convicted_by_those_that_waited() -> None:
    """Its peers on another node are overdue by their own node's clock, which knows nothing of the slow loader."""
    assert convict({0: at(begun=3), 1: at(begun=2, overdue=False)}) == ()


def test_nobody_is_convicted_while_a_rank_that_they_may_wait_for_is_within_its_cap() -> None:
    assert convict({0: at(begun=3), 1: at(phase="eval", begun=2, overdue=False, within_cap=True)}) == ()
    assert convict({0: at(step=6), 1: at(phase="save", overdue=False, within_cap=True)}) == ()


def test_a_rank_behind_one_that_is_within_its_cap_is_convicted() -> None:
    assert convict({0: at(step=6, phase="data", overdue=False, within_cap=True), 1: at(step=5)}) == (1,)


def test_ranks_between_generations_are_nobodys_business() -> None:
    assert convict({0: at(), 1: at(phase="outside", step=0, overdue=False)}) == (0,)
