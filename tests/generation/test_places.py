"""Nodes that say which place they want get it, as far as it is free."""

from __future__ import annotations

from ridethrough.generation.membership import Membership


def seated(members: Membership) -> list[str]:
    return [node.id for node in members.active]


def test_the_first_world_is_in_the_order_of_the_wishes() -> None:
    members = Membership(num_workers=2)
    for node, wish in (("c", 2), ("x", None), ("a", 0), ("b", 1)):
        members.add(node, node, wish)
    members.promote(4)
    members.seat_as_wished()
    assert seated(members) == ["a", "b", "c", "x"]
    assert [members.place_of(node) for node in seated(members)] == [0, 1, 2, 3]


def test_without_a_wish_the_first_comes_first() -> None:
    members = Membership(num_workers=1)
    for node in "ba":
        members.add(node, node)
    members.promote(2)
    members.seat_as_wished()
    assert seated(members) == ["b", "a"]


def test_a_newcomer_takes_the_empty_place_that_it_wants() -> None:
    members = Membership(num_workers=1)
    for place, node in enumerate("abc"):
        members.add(node, node, place)
    members.promote(3)
    members.remove("a")
    members.remove("c")
    members.add("new", "new", 2)
    members.promote(3)
    assert members.place_of("new") == 2 and members.num_holes == 1
    members.add("other", "other", 7)
    members.promote(3)
    assert members.place_of("other") == 0 and members.full() is False and members.num_holes == 0
