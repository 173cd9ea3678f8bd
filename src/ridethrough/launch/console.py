"""What is seen live of the workers' output: lines with their rank before them. A line that is said again and again, and
the well-known noise of torch, NCCL and gloo, is counted instead. The files keep all of it."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass

_TELL_AFTER_S = 5.0
_SHOWN_TIMES = 3  # of a line that is said again and again

# What a restart, a peer's end or an exit makes these libraries say although nothing is wrong with the job.
_NOISE = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks",
        r"Unable to resolve hostname to a \(local\) address",
        r"TCPStore\.cpp.* failed on SocketImpl",
        r"ProcessGroup\w+\.cpp.*destroy_process_group\(\) was not called",
        r"NCCL WARN .*(Connection closed by|Connection reset by|Broken pipe|Accept failed)",
        r"resource_tracker: There appear to be \d+ leaked",
    )
)
_BELOW_NOISE = re.compile(r"^(\[rank\d+\]:)?\s*(Exception raised from|frame #\d+:|$)")


@dataclass
class _Folded:
    text: str = ""
    times: int = 0
    more: int = 0
    noise: bool = False


class Console:
    """One for all workers of a node. All methods run on the agent's event loop; the owner calls `tell` at the end."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bool], _Folded] = {}
        self._noise: dict[re.Pattern[str], _Folded] = {}
        self._timer: asyncio.TimerHandle | None = None

    def show(self, prefix: str, text: str, *, is_error: bool) -> None:
        """Prints a line of one rank's stream, unless it is folded into one that was printed."""
        before = self._last.setdefault((prefix, is_error), _Folded())
        noise = next((pattern for pattern in _NOISE if pattern.search(text)), None)
        if noise is not None:
            known = self._noise.get(noise)
            before.noise = known is not None
            if known is None:
                self._noise[noise] = _Folded(text)
                self._print(prefix, text, is_error)
            else:
                known.more += 1
                self._later()
        elif before.noise and _BELOW_NOISE.match(text):
            pass  # the stack under a folded line
        elif text and text == before.text and before.times >= _SHOWN_TIMES:
            before.more += 1
            self._later()
        else:
            self._tell_repeats(prefix, is_error, before)
            before.times = before.times + 1 if text == before.text else 1
            before.text, before.noise = text, False
            self._print(prefix, text, is_error)

    def begin(self, prefix: str) -> None:
        """A rank's process or generation begins: what it says now is no repetition of what was said before."""
        for is_error in (False, True):
            self._tell_repeats(prefix, is_error, self._last.pop((prefix, is_error), _Folded()))

    def tell(self) -> None:
        """Says how many lines were folded since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (prefix, is_error), folded in self._last.items():
            self._tell_repeats(prefix, is_error, folded)
        for folded in self._noise.values():
            if folded.more:
                self._print("ridethrough: ", f"{folded.more} more like: {folded.text}", True)
                folded.more = 0

    def _later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TELL_AFTER_S, self.tell)

    def _tell_repeats(self, prefix: str, is_error: bool, folded: _Folded) -> None:
        if folded.more:
            self._print(prefix, f"(the same line {folded.more} times more)", is_error)
            folded.more = 0

    @staticmethod
    def _print(prefix: str, text: str, is_error: bool) -> None:
        print(f"{prefix}{text}", file=sys.stderr if is_error else sys.stdout, flush=True)
