"""Numbered messages that can be sent again, so that a broken connection loses nothing. Pure.

Each side numbers what it sends and says at each reconnection the last number that it has received; the other side sends
what came after. Numbers begin anew with each coordinator (epoch).
"""

from __future__ import annotations

from collections import deque
from typing import Any

_KEPT = 4096


class Outbox:
    """What was sent, by number, as long as it may be asked for again."""

    def __init__(self) -> None:
        self._next = 1
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def add(self, message: dict[str, Any]) -> dict[str, Any]:
        """Gives the message its number."""
        numbered = {**message, "n": self._next}
        self._next += 1
        self._kept.append(numbered)
        return numbered

    def after(self, number: int) -> list[dict[str, Any]]:
        """Everything behind `number`, in order. Raises LookupError if some of it is forgotten."""
        rest = [message for message in self._kept if message["n"] > number]
        if number + 1 < self._next and (not rest or rest[0]["n"] != number + 1):
            raise LookupError(f"messages after {number} are no longer kept")
        return rest

    def clear(self) -> None:
        self._next = 1
        self._kept.clear()


class Inbox:
    """Takes each number once."""

    def __init__(self) -> None:
        self.last = 0

    def fresh(self, message: dict[str, Any]) -> bool:
        """Whether the message was not seen before; unnumbered ones always are fresh."""
        number = message.get("n")
        if number is None:
            return True
        if number <= self.last:
            return False
        self.last = number
        return True
