"""Who holds up the others: a pure verdict over the ranks of all nodes.

A rank that waits cannot be guilty. Ranks are behind one another by step and place in the step; within one place, by the
collectives that they have begun on each process group: who has begun fewer than a peer on some group is what that
peer waits for, unless it waits itself, in another group, for somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridethrough.generation.messages import Situation

# Where a phase lies in its step: who is in an earlier one has not arrived yet.
_PLACE = {"outside": -4, "recovery": -3, "group": -2, "init": -1, "load": 0, "finish": 2, "held": 3}
_IN_THE_STEP = 1


def place(step: int, phase: str) -> tuple[int, int]:
    """Order of arrival: the step, then the place in it. A script may save, load data or evaluate anywhere in a step."""
    return (step, _PLACE.get(phase, _IN_THE_STEP))


def _place(situation: Situation) -> tuple[int, int]:
    return place(situation.step, situation.phase)


def convict(situations: Mapping[int, Situation]) -> tuple[int, ...]:
    """The ranks that did not arrive. Nobody who may rightly wait for a rank that is in a phase that may take long
    (loading, saving, evaluating) and is not ahead of it; nobody while no rank is overdue; nobody who has only just come
    to where it is, whatever the others think of it."""
    if not any(s.overdue for s in situations.values()):
        return ()
    busy = [_place(s) for s in situations.values() if s.within_cap]
    accused = {r: s for r, s in situations.items() if not s.within_cap and s.phase not in ("outside", "held")}
    if busy:
        accused = {r: s for r, s in accused.items() if s.overdue and _place(s) < min(busy)}
    if not accused:
        return ()
    first = min(_place(s) for s in accused.values())
    last = {r for r, s in accused.items() if _place(s) == first}
    behind, waiting = _behind_and_waiting(situations)
    for narrower in (
        last & (behind - waiting),
        {r for r in last if situations[r].silent},
        last & behind,
        {r for r in last if situations[r].overdue},
    ):
        if narrower:
            last = narrower
            break
    return tuple(sorted(r for r in last if situations[r].late))


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
