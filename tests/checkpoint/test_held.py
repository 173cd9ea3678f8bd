"""The memory tier's bookkeeping: which version is the base, what is freed, what two nodes have in common."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ridethrough.checkpoint.held import NOTHING, Tier, newest_common


class Payload:
    def __init__(self, name: str, counts: bool = True) -> None:
        self.name, self.true = name, counts

    def __repr__(self) -> str:
        return self.name


def tier(ranks: int = 2, world: int = 2) -> Tier:
    made = Tier(lambda payload: payload.true)
    made.begin((0, 1), frozenset(range(ranks)), world)
    return made


def add(tier: Tier, step: int, rank: int, finite: bool = True, counts: bool = True, generation: int = 1) -> Payload:
    payload = Payload(f"{step}/{rank}", counts)
    tier.add((0, generation, step), "l", rank, payload, finite)
    return payload


def freed(tier: Tier) -> list[str]:
    return sorted(p.name for p in tier.take_freed())


def steps(tier: Tier) -> list[int]:
    return sorted(key[2] for key in tier.versions)


def test_the_base_follows_the_newest_version_that_is_whole_on_all_ranks() -> None:
    one = tier()
    add(one, 1, 0)
    assert one.base == NOTHING
    add(one, 1, 1)
    add(one, 2, 0)
    assert one.base == (0, 1, 1) and freed(one) == []
    add(one, 2, 1)
    assert one.base == (0, 1, 2) and freed(one) == ["1/0", "1/1"]


def test_a_version_whose_fences_have_not_run_replaces_nothing() -> None:
    one = tier()
    for rank in range(2):
        add(one, 1, rank)
    landed = [add(one, 2, rank, counts=False) for rank in range(2)]
    assert one.base == (0, 1, 1) and freed(one) == []
    for payload in landed:
        payload.true = True
    add(one, 3, 0)
    assert one.base == (0, 1, 2) and freed(one) == ["1/0", "1/1"]


def test_a_version_that_a_rank_skipped_goes_since_it_can_never_be_whole() -> None:
    one = tier()
    for step in (1, 2, 3):
        add(one, step, 0)
    assert steps(one) == [1, 2, 3]
    add(one, 3, 1)
    assert steps(one) == [3] and one.base == (0, 1, 3)


def test_a_version_that_is_not_finite_never_becomes_the_base() -> None:
    one = tier()
    for rank in range(2):
        add(one, 1, rank)
    add(one, 2, 0)
    add(one, 2, 1, finite=False)
    for rank in range(2):
        add(one, 3, rank, finite=rank == 1)
    assert one.base == (0, 1, 1) and steps(one) == [1]
    assert freed(one) == ["2/0", "2/1", "3/0", "3/1"]


def test_after_a_load_only_the_base_counts_until_a_newer_one_is_whole_everywhere() -> None:
    one = tier()
    for step, rank in ((4, 0), (4, 1), (5, 0)):
        add(one, step, rank)
    one.settle((0, 1, 4), (0, 2))
    one.begin((0, 2), frozenset((0, 1)), 2)
    assert steps(one) == [4] and freed(one) == ["5/0"]
    assert [i["key"] for i in one.inventory()] == [[0, 1, 4]]
    late = add(one, 5, 1, generation=1)
    assert freed(one) == [late.name], "the old generation has nothing to say any more"
    add(one, 5, 0, generation=2)
    assert steps(one) == [4, 5]
    add(one, 5, 1, generation=2)
    assert one.base == (0, 2, 5) and steps(one) == [5]


def test_a_rank_that_finds_its_snapshot_torn_takes_it_back() -> None:
    one = tier()
    add(one, 1, 0, counts=False)
    one.withdraw((0, 1, 1), 0)
    assert steps(one) == [] and freed(one) == ["1/0"]


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_four_slots_and_one_while_a_write_lasts_are_enough(seed: int, writing: bool) -> None:
    """Rule 5: base, candidate, newest and the one being filled. Two ranks that are at most one step apart, any order
    of landing, each before the rank's next boundary; a rank without a free slot leaves its snapshot out, and some are
    left out or not finite by chance. As soon as one version has been whole there always is one, and after some
    undisturbed steps it is the newest that can be."""
    chance = random.Random(seed)
    one, at, base = tier(), [0, 0], NOTHING
    taken: list[set[Payload]] = [set(), set()]
    filling: list[tuple[int, Payload, bool] | None] = [None, None]
    written: set[Payload] = set()

    def advance(rank: int, disturbed: bool) -> None:
        nonlocal base
        at[rank] += 1
        landed = filling[rank]
        if landed is not None:
            step, payload, finite = landed
            one.add((0, 1, step), "l", rank, payload, finite)
        filling[rank] = None
        if len(taken[rank]) < 4 + writing and not (disturbed and chance.random() < 0.1):
            begun = Payload(f"{at[rank]}/{rank}")
            taken[rank].add(begun)
            filling[rank] = (at[rank], begun, not (disturbed and chance.random() < 0.05))
        gone = set(one.take_freed()) - written
        for payloads in taken:
            payloads -= gone
        assert one.base >= base
        base = one.base
        if base != NOTHING:
            assert newest_common([one.inventory()])[0]["key"] >= list(base)

    for _ in range(400):
        rank = chance.randrange(2)
        if at[rank] <= at[1 - rank]:
            advance(rank, disturbed=True)
        if writing and base != NOTHING and chance.random() < 0.05:  # the last write ends, another begins
            held = {p for version in one.versions.values() for p in version.parts.values()}
            for payloads in taken:
                payloads -= written - held
            written = set(one.versions[base].parts.values())
    for _ in range(12):
        advance(0 if at[0] <= at[1] else 1, disturbed=False)
    assert base[2] >= min(at) - 1, "the step before the one that is being filled"


def test_nodes_meet_at_the_newest_version_that_is_there_for_every_rank() -> None:
    def inventory(*items: tuple[int, list[int]]) -> list[dict[str, Any]]:
        return [{"key": [0, 1, step], "world_size": 4, "ranks": ranks} for step, ranks in items]

    mine = inventory((7, [0, 1]), (6, [0, 1]), (5, [0, 1]))
    theirs = inventory((6, [2, 3]), (5, [2, 3, 0]))
    found = newest_common([mine, theirs])
    assert [e["key"][2] for e in found] == [6, 5]
    assert found[1]["holders"] == {0: [0, 1], 1: [0], 2: [1], 3: [1]}
    assert [e["key"][2] for e in newest_common([mine, theirs], older_than=6)] == [5]
    assert newest_common([mine, []]) == []
    other = [{"key": [0, 2, 6], "world_size": 4, "ranks": [2, 3]}]
    assert newest_common([mine, other]) == [], "the same step of another generation is another version"
