"""The keeper's choice of what to write next: a pure machine, tried without a keeper."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.checkpoint.backlog import QUEUED, WRITING, Group, Snapshot, Staged


def stage(group: Group, sequence: int, rank: int, durable: bool = False) -> list[int]:
    snapshot = Snapshot(sequence, sequence * 10, durable, f"a{sequence}")
    return [s.sequence for s in group.stage(snapshot, Staged(rank))]


def group(local: int = 2, world: int = 2) -> Group:
    return Group(("root", "line"), frozenset(range(local)), world)


def test_the_newest_that_all_ranks_staged_is_written_and_older_ones_are_dropped() -> None:
    one = group()
    assert stage(one, 1, 0) == [] and one.pick() is None
    assert stage(one, 2, 0) == []
    assert stage(one, 1, 1) == []
    picked = one.pick()
    assert picked is not None and picked.sequence == 1
    picked.state = WRITING
    assert stage(one, 3, 0) == []
    assert stage(one, 2, 1) == []
    assert stage(one, 3, 1) == [2]
    one.finish(picked)
    picked = one.pick()
    assert picked is not None and picked.sequence == 3


def test_per_rank_newest_would_never_complete_but_common_newest_does() -> None:
    one = group()
    for sequence in range(1, 50):
        stage(one, sequence, 0)
        if sequence > 1:
            stage(one, sequence - 1, 1)  # one rank is always a step behind
            picked = one.pick()
            assert picked is not None and picked.sequence == sequence - 1
            one.finish(picked)


def test_durable_saves_are_never_dropped_and_go_in_order() -> None:
    one = group()
    for sequence in range(1, 6):
        for rank in range(2):
            assert sequence != 5 or stage(one, sequence, rank, durable=False) in ([], [3])
            if sequence != 5:
                stage(one, sequence, rank, durable=sequence in (2, 4))
    order = []
    while (picked := one.pick()) is not None:
        order.append(picked.sequence)
        one.finish(picked)
    assert order == [2, 4, 5]


def test_a_follower_waits_for_the_leader_and_keeps_its_two_newest() -> None:
    follower = Group(("root", "line"), frozenset({2, 3}), 4)
    for sequence in (1, 2, 3):
        stage(follower, sequence, 2)
        dropped = stage(follower, sequence, 3)
        assert dropped == ([1] if sequence == 3 else [])
    assert follower.pick(set()) is None
    picked = follower.pick({(20, "a2"), (30, "a2")})
    assert picked is not None and picked.sequence == 2


def test_a_commit_ends_the_wait_of_what_a_follower_kept_for_the_leader() -> None:
    follower = Group(("root", "line"), frozenset({1}), 2)
    stage(follower, 1, 1, durable=True)
    for sequence in (2, 3):
        assert stage(follower, sequence, 1) == []
    picked = follower.pick({(30, "a3")})
    assert picked is not None and picked.sequence == 3
    follower.finish(picked)
    assert [s.sequence for s in follower.obsolete(picked)] == [2]
    assert list(follower.snapshots) == [1], "a durable one is never dropped"


def test_a_save_in_which_a_rank_has_no_part_is_given_back_to_the_others() -> None:
    one = group(3, 3)
    stage(one, 1, 0, durable=True)
    gone = one.drop(1)
    assert gone is not None and list(gone.parts) == [0]
    assert stage(one, 1, 2, durable=True) == [1] and one.idle and not one.snapshots
    assert one.drop(2) is None  # the word may come before any part
    assert stage(one, 2, 0) == [2]
    for rank in range(3):
        stage(one, 3, rank)
    picked = one.pick()
    assert picked is not None and picked.sequence == 3
    picked.state = WRITING
    assert one.drop(3) is None, "it is whole, and on its way"
    one.finish(picked)
    one.obsolete(picked)
    assert not {1, 2} & one.dropped, "what is behind a commit needs no remembering"


def test_a_sealed_generation_keeps_its_newest_whole_snapshot_only() -> None:
    one = group()
    for sequence in (1, 2):
        stage(one, sequence, 0)
    stage(one, 1, 1)
    gone = one.seal("a newer generation loads", complete_too=False)
    assert [s.sequence for s in gone] == [2]
    assert not one.idle
    assert stage(one, 3, 0) == [3]
    assert [s.sequence for s in one.seal("started", complete_too=True)] == [1]
    assert one.idle


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.data())
def test_in_any_order_of_staging_what_is_written_only_grows_and_durable_ones_all_are(
    events: list[tuple[int, bool]], data: st.DataObject
) -> None:
    one = group(3, 3)
    nexts = [1, 1, 1]
    durable = {s: data.draw(st.booleans()) for s in range(1, 70)}
    written: list[int] = []
    for rank, write in events:
        stage(one, nexts[rank], rank, durable[nexts[rank]])
        nexts[rank] += 1
        if write and (picked := one.pick()) is not None:
            written.append(picked.sequence)
            one.finish(picked)
    while (picked := one.pick()) is not None:
        written.append(picked.sequence)
        one.finish(picked)
    common = min(nexts) - 1
    assert {s for s in range(1, common + 1) if durable[s]} <= set(written)
    plain = [s for s in written if not durable[s]]
    assert plain == sorted(plain)
    if common:
        assert max(written) == common
    assert all(s.state == QUEUED and not one.complete(s) for s in one.snapshots.values())
