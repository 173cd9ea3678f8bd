"""Who holds up the others: a pure verdict over the ranks of all nodes."""

from __future__ import annotations

from collections.abc import Mapping

from ridethrough.generation.messages import Situation


def convict(situations: Mapping[int, Situation]) -> tuple[int, ...]:
    """The ranks that did not arrive: in the lowest step, with the fewest collectives begun. Nobody, while some rank is
    in a phase that may take long (loading, saving, evaluating): its peers may be waiting for it rightly."""
    if not situations or any(s.within_cap for s in situations.values()):
        return ()
    lowest = min((s.step, s.collectives) for s in situations.values())
    return tuple(sorted(rank for rank, s in situations.items() if (s.step, s.collectives) == lowest))
