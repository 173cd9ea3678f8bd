"""Which members are still there, from when they were last heard of. Pure: the time comes with each call.

A member is lost when it was not heard of for a whole lease. Two rules keep a judge that is itself in trouble from
condemning others: a late look extends every lease by its lateness, and when more than half of all members would be
lost at one look, the judge is the one that is cut off, and nobody is lost for one more lease.
"""

from __future__ import annotations

_LATE_S = 0.5


class Leases:
    """Members by id. `lease_s` is the time without a word after which a member counts as lost."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._ends_s: dict[str, float] = {}
        self._spared: set[str] = set()
        self._last_look_s: float | None = None

    def heard(self, member: str, now_s: float) -> None:
        self._ends_s[member] = now_s + self._lease_s
        self._spared.discard(member)

    def shorten(self, member: str, now_s: float, rest_s: float) -> None:
        """The member's connection broke: it has `rest_s` to come back, or less if its lease ends before."""
        if member in self._ends_s:
            self._ends_s[member] = min(self._ends_s[member], now_s + rest_s)

    def forget(self, member: str) -> None:
        self._ends_s.pop(member, None)
        self._spared.discard(member)

    def lost(self, now_s: float) -> list[str]:
        """Members whose lease has ended; each is returned once. Call it several times a second, after having taken in
        every message that was waiting."""
        if self._last_look_s is not None:
            late_s = now_s - self._last_look_s
            if late_s > _LATE_S:
                for member in self._ends_s:
                    self._ends_s[member] += late_s
        self._last_look_s = now_s
        ended = [member for member, end_s in self._ends_s.items() if end_s <= now_s]
        fresh = [member for member in ended if member not in self._spared]
        if len(fresh) > 1 and 2 * len(fresh) > len(self._ends_s):
            for member in ended:
                self._ends_s[member] = now_s + self._lease_s
            self._spared.update(ended)
            return []
        for member in ended:
            self.forget(member)
        return ended
