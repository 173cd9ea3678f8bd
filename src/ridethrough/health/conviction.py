"""Who holds up the others: a pure verdict over the ranks of all nodes.

A rank that waits cannot be guilty. Ranks are behind one another by step and place in the step; within one place, by the
collectives that they have begun on each process group: who has begun fewer than a peer on some group is what that
peer waits for, unless it waits itself, in another group, for somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridethrough.generation.messages import Situation

# Where a phase lies in its step: who is in an earlier one has not arrived yet.
_PLACE = {"outside": -4, "recovery": -3, "group": -2, "init": -1, "load": 0, "save": 2, "finish": 3, "held": 4}
_IN_THE_STEP = 1


def place(situation: Situation) -> tuple[int, int]:
    """Order of arrival: the step, then the place in it."""
    return (situation.step, _PLACE.get(situation.phase, _IN_THE_STEP))


def convict(situations: Mapping[int, Situation]) -> tuple[int, ...]:
    """The ranks that did not arrive. Nobody who may rightly wait for a rank that is in a phase that may take long
    (loading, saving, evaluating) and is not ahead of it; nobody while no rank is overdue."""
    if not any(s.overdue for s in situations.values()):
        return ()
    busy = [place(s) for s in situations.values() if s.within_cap]
    accused = {r: s for r, s in situations.items() if not s.within_cap and s.phase not in ("outside", "held")}
    if busy:
        accused = {r: s for r, s in accused.items() if s.overdue and place(s) < min(busy)}
    if not accused:
        return ()
    first = min(place(s) for s in accused.values())
    last = {r for r, s in accused.items() if place(s) == first}
    if len(last) == 1:
        return tuple(last)
    behind, waiting = _behind_and_waiting(situations)
    for narrower in (
        last & (behind - waiting),
        {r for r in last if situations[r].silent},
        last & behind,
        {r for r in last if situations[r].overdue},
    ):
        if narrower:
            return tuple(sorted(narrower))
    return tuple(sorted(last))


def _behind_and_waiting(situations: Mapping[int, Situation]) -> tuple[set[int], set[int]]:
    """Ranks that lack a collective which a peer has begun, and ranks that have begun one which a peer lacks."""
    behind: set[int] = set()
    waiting: set[int] = set()
    for key in {key for s in situations.values() for key in s.groups}:
        begun = {r: s.groups[key] for r, s in situations.items() if key in s.groups}
        most, fewest = max(begun.values()), min(begun.values())
        if most != fewest:
            behind |= {r for r, n in begun.items() if n < most}
            waiting |= {r for r, n in begun.items() if n > fewest}
    return behind, waiting
