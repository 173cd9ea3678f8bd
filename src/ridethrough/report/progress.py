"""One line of live progress and one line per thing that happens, folded from events as they come in.

progress = Progress(total=200)
for line in progress.update(follower.poll()): print(line)      # incidents
print(progress.line(), end="\\r")                               # step, loss, tokens/s, generation
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator

from ridethrough.ledger.incidents import place
from ridethrough.ledger.reading import Event

_WINDOW = 50  # steps that the token rate is taken from


class Progress:
    """What a run is doing now. `total`: steps it will do, if known."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.generation = 0
        self.step = 0
        self.loss: float | None = None
        self.ended: Event | None = None
        self.num_incidents = 0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)  # t0, t1, tokens
        self._injected: dict[tuple[int, int], Event] = {}
        self._open: tuple[int, int, int] | None = None  # generation, fault ns, step reached
        self._resumed_at: int | None = None
        self._rank = sys.maxsize  # the lowest rank that was heard of

    def update(self, events: Iterable[Event]) -> list[str]:
        """Take new events in; returns a line for each fault, decision and recovery among them."""
        return [line for event in events for line in self._one(event)]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the last steps of this generation; None if no step logs `tokens`."""
        tokens = sum(count for _, _, count in self._recent)
        if not tokens:
            return None
        seconds = (max(t1 for _, t1, _ in self._recent) - min(t0 for t0, _, _ in self._recent)) / 1e9
        return tokens / seconds if seconds > 0 else None

    def line(self) -> str:
        """For example `step 120/200  loss 3.2145  45,210 tokens/s  generation 2  incidents 1`."""
        parts = [f"step {self.step}" + (f"/{self.total}" if self.total else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        parts.append(f"generation {self.generation}")
        if self.num_incidents:
            parts.append(f"incidents {self.num_incidents}")
        if self._open is not None:
            parts.append("recovering")
        return "  ".join(parts)

    def _one(self, event: Event) -> Iterator[str]:
        kind = event["kind"]
        if kind == "step":
            yield from self._stepped(event)
        elif kind == "fault_injected":
            self._injected[event["generation"], event["rank"]] = event
        elif kind == "fault":
            yield from self._faulted(event)
        elif kind == "incident":
            where = f"rank {event['rank']}" if event["rank"] is not None else "the job"
            yield f"incident {event['id']}: {event['class']} of {where}, rung {event['rung']}"
        elif kind in ("resumed", "load") and event["generation"] >= self.generation:
            self._resumed_at = event["step"]
        elif kind == "plan":
            self.generation = max(self.generation, event["generation"])
            self._resumed_at = None
        elif kind == "job_end":
            self.ended = event

    def _stepped(self, event: Event) -> Iterator[str]:
        if event["generation"] < self.generation:
            return
        if event["generation"] > self.generation:
            self.generation = event["generation"]
            self._recent.clear()
        self.step = event["step"]
        if isinstance(event.get("loss"), (int, float)):
            self.loss = float(event["loss"])
        if event["rank"] <= self._rank:  # each rank says the same
            self._rank = event["rank"]
            self._recent.append((event["t0_ns"], event["t1_ns"], float(event.get("tokens") or 0)))
        if self._open is not None and event["generation"] > self._open[0]:
            _, fault_ns, reached = self._open
            self._open = None
            at = self._resumed_at if self._resumed_at is not None else event["step"] - 1
            yield (
                f"recovered: first step {(event['t1_ns'] - fault_ns) / 1e9:.2f} s after the fault, "
                f"resumed at step {at}, {max(0, reached - at)} steps lost"
            )

    def _faulted(self, event: Event) -> Iterator[str]:
        generation = event["generation"]
        if not isinstance(event.get("rank"), int):
            return  # a spare died: nobody notices
        if self._open is not None and self._open[0] >= generation:
            return  # a victim's report, or a late one
        own = self._injected.get((generation, event["rank"]))
        fault_ns = own["t_ns"] if own is not None else event.get("fault_ns") or event["t_ns"]
        shots = [e["t_ns"] for (g, _), e in self._injected.items() if g == generation and e["t_ns"] <= event["t_ns"]]
        fault_ns = min([fault_ns, *shots])
        if self._open is None:
            self.num_incidents += 1
            self._open = (generation, fault_ns, self.step)
        else:
            self._open = (generation, *self._open[1:])
        self._recent.clear()
        where = f"rank {event['rank']}, {place(event.get('phase'), event.get('step'))}"
        injected = f" (injected: {own['id']})" if own is not None else ""
        yield (
            f"fault: {event['class']} on {where}{injected}, seen by {event['detected_by']} "
            f"after {(event['t_ns'] - fault_ns) / 1e9:.2f} s; generation {generation} ends"
        )
