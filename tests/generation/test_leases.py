"""A late judge condemns nobody, nor one that hears from nobody."""

from __future__ import annotations

from ridethrough.generation.leases import Leases


def watched(*members: str) -> Leases:
    leases = Leases(5.0)
    for member in members:
        leases.heard(member, 0.0)
    return leases


def look(leases: Leases, begin_s: float, end_s: float, *, heard: tuple[str, ...] = ()) -> list[tuple[float, str]]:
    out = []
    for tick in range(int(begin_s * 10) + 1, int(end_s * 10) + 1):
        now_s = tick / 10
        for member in heard:
            leases.heard(member, now_s)
        out += [(now_s, member) for member in leases.lost(now_s)]
    return out


def test_a_silent_member_is_lost_once_at_the_end_of_its_lease() -> None:
    assert look(watched("a", "b", "c"), 0.0, 12.0, heard=("a", "b")) == [(5.0, "c")]


def test_a_late_look_extends_every_lease_by_its_lateness() -> None:
    leases = watched("a")
    assert look(leases, 0.0, 4.0) == []
    assert leases.lost(30.0) == []
    assert look(leases, 30.0, 40.0) == [(31.0, "a")]


def test_more_than_half_at_once_means_that_the_judge_is_cut_off_for_one_lease_only() -> None:
    leases = watched("a", "b", "c")
    lost = look(leases, 0.0, 20.0, heard=("a",))
    assert lost == [(10.0, "b"), (10.0, "c")]


def test_who_speaks_again_in_that_lease_is_not_lost() -> None:
    leases = watched("a", "b", "c")
    assert look(leases, 0.0, 7.0, heard=("a",)) == []
    leases.heard("b", 7.0)
    assert look(leases, 7.0, 11.0, heard=("a", "b")) == [(10.0, "c")]


def test_a_broken_connection_shortens_a_lease_and_never_extends_it() -> None:
    leases = watched("a", "b", "c")
    leases.shorten("a", 1.0, 1.5)
    leases.shorten("b", 1.0, 60.0)
    assert look(leases, 0.0, 6.0, heard=("c",)) == [(2.5, "a"), (5.0, "b")]


def test_a_member_that_was_forgotten_is_not_lost() -> None:
    leases = watched("a")
    leases.forget("a")
    assert look(leases, 0.0, 10.0) == []
