"""What a keeper holds in memory for the next recovery: a pure state machine, without memory, sockets or clocks.

Versions of a state are told apart by (epoch, generation, step), never by the step alone. One of them is the *base*:
the newest one that is whole and finite on every rank; it is never given up for anything but a newer base. Versions
behind it go, and so does one that some rank has skipped, since it can never be whole. When all ranks have loaded a
version, it is the base and nothing else counts any more.

`counts(payload)` says whether a rank's share is a true snapshot: marks that agree, and a fence that has run (or a
process that ended before it could write anything).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int, int]
NOTHING: Key = (-1, -1, -1)


@dataclass
class Version:
    """Shares of one version on this node, by rank. `world_size` is that of the world which made it."""

    key: Key
    world_size: int
    lineage: str
    parts: dict[int, Any] = field(default_factory=dict)


class Tier:
    """One root's versions on this node. Every method returns or collects in `freed` what is not needed any more."""

    def __init__(self, counts: Callable[[Any], bool]) -> None:
        self._counts = counts
        self.versions: dict[Key, Version] = {}
        self.base: Key = NOTHING
        self.lineage: tuple[int, int] = (-1, -1)
        self.local_ranks: frozenset[int] = frozenset()
        self.world_size = 0
        self.newest: dict[int, Key] = {}  # of each local rank
        self.poisoned: set[Key] = set()
        self.freed: list[Any] = []
        self.replicas: dict[Key, dict[int, Any]] = {}  # other nodes' shares
        self.replica_worlds: dict[Key, int] = {}

    def take_freed(self) -> list[Any]:
        gone, self.freed = self.freed, []
        return gone

    # -- what comes in ----------------------------------------------------------------------------------------------
    def begin(self, lineage: tuple[int, int], local_ranks: frozenset[int], world_size: int) -> None:
        """Ranks of a generation start to hand over snapshots."""
        if lineage > self.lineage:
            self.lineage, self.local_ranks, self.world_size = lineage, local_ranks, world_size
            self.newest, self.poisoned = {}, set()

    def add(self, key: Key, lineage: str, rank: int, payload: Any, good: bool) -> None:
        """A rank's share has landed. One of an older generation, or of a version that is not good (not finite, or
        suspect), is freed."""
        if key[:2] != self.lineage or key <= self.base:
            self.freed.append(payload)
            return
        self.newest[rank] = max(key, self.newest.get(rank, NOTHING))
        if not good:
            self.poisoned.add(key)
        if key in self.poisoned:
            self.freed.append(payload)
            self._drop(key)
        else:
            version = self.versions.setdefault(key, Version(key, self.world_size, lineage))
            if rank in version.parts:
                self.freed.append(version.parts[rank])
            version.parts[rank] = payload
        for skipped in [k for k, v in self.versions.items() if k[:2] == self.lineage and k < key]:
            if rank not in self.versions[skipped].parts:
                self._drop(skipped)
        self.advance()

    def withdraw(self, key: Key, rank: int) -> None:
        """A rank has found its snapshot torn."""
        version = self.versions.get(key)
        if version is not None and rank in version.parts:
            self.freed.append(version.parts.pop(rank))
            if not version.parts:
                del self.versions[key]

    def settle(self, key: Key | None, lineage: tuple[int, int]) -> None:
        """All ranks of `lineage` have loaded `key` (None: something that no memory holds)."""
        if lineage < self.lineage:
            return
        for other in list(self.versions):
            if other != key and other[:2] != lineage:
                self._drop(other)
        for other in [k for k in self.replicas if k != key and k[:2] != lineage]:
            self._drop_replica(other)
        self.base = key if key is not None else NOTHING

    # -- what is there ----------------------------------------------------------------------------------------------
    def complete(self) -> list[Key]:
        """Versions of this generation that every local rank has, newest first."""
        mine = [k for k in self.versions if k[:2] == self.lineage and self._all(k, self._counts)]
        return sorted(mine, reverse=True)

    def flushable(self, landed: Callable[[Any], bool]) -> list[Key]:
        """Versions that may be written to storage without asking anybody, newest first: where rank 0 is, those that
        the nodes agree on."""
        keys = [k for k in sorted(self.versions, reverse=True) if self._all(k, landed)]
        return keys if self.alone or not self.leads else [k for k in keys if k <= self.base]

    def _all(self, key: Key, true: Callable[[Any], bool]) -> bool:
        parts = self.versions[key].parts
        return self.local_ranks <= parts.keys() and all(map(true, parts.values()))

    @property
    def leads(self) -> bool:
        return 0 in self.local_ranks

    @property
    def alone(self) -> bool:
        return len(self.local_ranks) == self.world_size

    def advance(self, agreed: Key | None = None) -> None:
        """Move the base: alone as far as the local ranks allow, else to what the nodes have agreed on."""
        if self.alone and agreed is None:
            agreed = next(iter(self.complete()), None)
        if agreed is None or agreed <= self.base:
            return
        self.base = agreed
        for key in [k for k in self.versions if k < agreed]:
            self._drop(key)
        for key in [k for k in self.replicas if k < agreed]:
            self._drop_replica(key)

    def agree(self, base: Key, following: Key, common: Key) -> None:
        """What the nodes keep: the base, the one that is being replicated, and everything from `common` on."""
        self.advance(base)
        for key in [k for k in self.versions if k[:2] == self.lineage and k < common]:
            if key not in (self.base, following):
                self._drop(key)
        for key in [k for k in self.replicas if k < self.base]:
            self._drop_replica(key)

    def add_replica(self, key: Key, world_size: int, rank: int, payload: Any) -> None:
        if key < self.base and key[:2] == self.lineage:
            return
        self.replicas.setdefault(key, {})[rank] = payload
        self.replica_worlds[key] = world_size

    def _drop_replica(self, key: Key) -> None:
        self.replicas.pop(key, None)
        self.replica_worlds.pop(key, None)

    def inventory(self) -> list[dict[str, Any]]:
        """What could be loaded, newest first: the ranks whose share counts, of each version."""
        found = []
        for key in sorted({*self.versions, *self.replicas}, reverse=True):
            version = self.versions.get(key)
            parts = version.parts if version is not None else {}
            ranks = {rank for rank, payload in parts.items() if self._counts(payload)} | set(self.replicas.get(key, ()))
            world = version.world_size if version is not None else self.replica_worlds[key]
            if ranks:
                found.append({"key": list(key), "world_size": world, "ranks": sorted(ranks)})
        return found

    def part(self, key: Key, rank: int) -> Any:
        """The payload, own or replica, or None."""
        version = self.versions.get(key)
        own = version.parts.get(rank) if version is not None else None
        return own if own is not None else self.replicas.get(key, {}).get(rank)

    def forget(self) -> None:
        """Everything is durable, or nobody needs it any more."""
        for key in list(self.versions):
            self._drop(key)
        self.replicas.clear()
        self.base = NOTHING

    def _drop(self, key: Key) -> None:
        version = self.versions.pop(key, None)
        if version is not None:
            self.freed.extend(version.parts.values())


def newest_common(inventories: Iterable[list[dict[str, Any]]], older_than: int | None = None) -> list[dict[str, Any]]:
    """Versions that all nodes together hold for every rank, newest first: {"key", "world_size", "holders"}, where
    holders[i] are the nodes (numbered as given) that hold rank i. Pure; `older_than` leaves out later steps."""
    found: dict[Key, dict[str, Any]] = {}
    for node, inventory in enumerate(inventories):
        for item in inventory:
            key = (int(item["key"][0]), int(item["key"][1]), int(item["key"][2]))
            entry = found.setdefault(key, {"key": list(key), "world_size": item["world_size"], "holders": {}})
            for rank in item["ranks"]:
                entry["holders"].setdefault(rank, []).append(node)
    whole = [e for e in found.values() if len(e["holders"]) == e["world_size"]]
    if older_than is not None:
        whole = [e for e in whole if e["key"][2] < older_than]
    return sorted(whole, key=lambda e: e["key"], reverse=True)
