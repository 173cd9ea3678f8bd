"""What a keeper has been handed and what it should write next: a pure state machine, without files, sockets
or clocks.

A *group* is one generation's ranks on this node writing to one root. A snapshot is complete when all local
ranks have staged it. The newest complete one is written next and older queued ones are superseded; a durable
one is never dropped and goes first, in order. Where other nodes' keepers write too, rank 0's keeper leads: it
picks, and the folder of the attempt appearing in the root is what the others follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

QUEUED, WRITING, WRITTEN, DONE = "queued", "writing", "written", "done"


@dataclass
class Staged:
    """One rank's staged share of a snapshot; `payload` is the keeper's (buffers, arena, connection)."""

    rank: int
    payload: Any = None


@dataclass
class Snapshot:
    sequence: int
    step: int
    durable: bool
    attempt: str
    parts: dict[int, Staged] = field(default_factory=dict)
    state: str = QUEUED
    give_up: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Group:
    """`local_ranks` are the ranks of this node; `leads` when rank 0 is among them; `alone` when all ranks
    are."""

    key: tuple[str, str]
    local_ranks: frozenset[int]
    world_size: int
    info: dict[str, Any] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    sealed: str | None = None
    dropped: set[int] = field(default_factory=set)  # sequences in which some rank has no part

    @property
    def leads(self) -> bool:
        return 0 in self.local_ranks

    @property
    def alone(self) -> bool:
        return len(self.local_ranks) == self.world_size

    def complete(self, snapshot: Snapshot) -> bool:
        return self.local_ranks <= snapshot.parts.keys()

    def stage(self, snapshot: Snapshot, part: Staged) -> list[Snapshot]:
        """Add a rank's part (to the known snapshot of that sequence, if any); returns the snapshots
        superseded by it."""
        known = self.snapshots.setdefault(snapshot.sequence, snapshot)
        known.parts[part.rank] = part
        known.durable = known.durable or snapshot.durable
        if self.sealed or known.sequence in self.dropped:
            del self.snapshots[known.sequence]
            return [known]
        return self.supersede()

    def drop(self, sequence: int) -> Snapshot | None:
        """A rank has no part in this snapshot, and never will: parts that came, or come later, are given back. Returns
        what was queued of it."""
        self.dropped.add(sequence)
        known = self.snapshots.get(sequence)
        return self._drop([known])[0] if known is not None and known.state == QUEUED else None

    def supersede(self) -> list[Snapshot]:
        """Drop what a newer complete snapshot makes useless. A follower keeps its two newest: the leader may
        pick either."""
        queued = [s for s in self.snapshots.values() if s.state == QUEUED]
        complete = sorted(s.sequence for s in queued if self.complete(s))
        hold = 1 if self.leads else 2
        if len(complete) < hold:
            return []
        floor = complete[-hold]
        return self._drop([s for s in queued if s.sequence < floor and not s.durable])

    def pick(self, announced: set[tuple[int, str]] | None = None) -> Snapshot | None:
        """The snapshot to write now, or None. A follower passes the attempts that the leader has announced, with their
        steps."""
        queued = [s for s in self.snapshots.values() if s.state == QUEUED and self.complete(s)]
        if not self.leads:
            queued = [s for s in queued if announced is not None and (s.step, s.attempt) in announced]
        durable = [s for s in queued if s.durable]
        if durable:
            return min(durable, key=lambda s: s.sequence)
        return max(queued, key=lambda s: s.sequence, default=None)

    def seal(self, reason: str, complete_too: bool) -> list[Snapshot]:
        """The generation is over: nothing more is taken, incomplete snapshots are dropped (complete ones as
        well if asked; one being written is told to give up). Returns what was dropped from the queue."""
        self.sealed = self.sealed or reason
        gone = [s for s in self.snapshots.values() if s.state == QUEUED and (complete_too or not self.complete(s))]
        if complete_too:
            for snapshot in self.snapshots.values():
                if snapshot.state == WRITING:
                    snapshot.give_up = reason
        elif not complete_too:
            rest = [s for s in self.snapshots.values() if s.state == QUEUED and self.complete(s)]
            best = max((s.sequence for s in rest), default=-1)
            gone += [s for s in rest if s.sequence != best and not s.durable]
        return self._drop(gone)

    def roll_back(self, step: int) -> list[Snapshot]:
        """A later generation has resumed at `step`: what lies above it is not to be committed. Returns what was dropped
        from the queue; one being written is told to give up."""
        above = [s for s in self.snapshots.values() if s.step > step]
        for snapshot in above:
            if snapshot.state == WRITING:
                snapshot.give_up = f"rolled back to step {step}"
        return self._drop([s for s in above if s.state == QUEUED])

    def obsolete(self, committed: Snapshot) -> list[Snapshot]:
        """Drop what a commit makes useless: older ones, of which a follower has kept one for the leader, and those that
        were queued without a worker's asking (they have no sequence) up to its step."""
        self.dropped = {sequence for sequence in self.dropped if sequence > committed.sequence}
        queued = [s for s in self.snapshots.values() if s.state == QUEUED]
        unasked = [s for s in queued if s.sequence < 0 and s.step <= committed.step]
        return self._drop(unasked + [s for s in queued if 0 <= s.sequence < committed.sequence and not s.durable])

    def finish(self, snapshot: Snapshot) -> None:
        snapshot.state = DONE
        self.snapshots.pop(snapshot.sequence, None)

    @property
    def idle(self) -> bool:
        """Nothing is being written, and nothing complete waits."""
        return not any(s.state in (WRITING, WRITTEN) or self.complete(s) for s in self.snapshots.values())

    def _drop(self, gone: list[Snapshot]) -> list[Snapshot]:
        for snapshot in gone:
            self.finish(snapshot)
        return gone
