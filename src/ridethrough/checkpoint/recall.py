"""Loading from memory: which version the nodes' keepers hold between them, agreed once, and put into the live state.

Each node's first rank asks its keeper what it holds. Rank 0 proposes the newest version that is there for every
rank of the world which made it; all ranks map what they need of it, and any rank's failure makes all step down to
the next older one. Nothing here touches storage. Training thread, alike on all ranks."""

from __future__ import annotations

import functools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridethrough.checkpoint import gpu, held, marks
from ridethrough.checkpoint.apply import Filling
from ridethrough.checkpoint.arena import POOL
from ridethrough.checkpoint.errors import HALF_WRITTEN, CheckpointError, DamagedCheckpoint
from ridethrough.checkpoint.layout import data_file
from ridethrough.checkpoint.meeting import Meeting
from ridethrough.checkpoint.restore import Index, Reader, Saved
from ridethrough.checkpoint.state import State

FETCH_LIMIT_S = 120.0
_FAILURES = (CheckpointError, OSError, KeyError, ValueError, RuntimeError)


@dataclass
class Recalled:
    """What was loaded. `tier` is "memory" if every rank found its share on its own node, else "peer"."""

    key: held.Key
    tier: str
    missing: list[str]
    extra: list[str]
    notes: list[str]

    @property
    def step(self) -> int:
        return self.key[2]


class Share:
    """One rank's held snapshot, mapped into this process; its own arenas are not mapped again."""

    def __init__(self, rank: int, reply: dict[str, Any]) -> None:
        self.rank, self.entries = rank, reply["entries"]
        self.alone: bool = reply["alone"]
        self.serial, self.source = reply["serial"], reply.get("source", "own")
        self.sizes = [reply["nbytes"], reply["tail_bytes"]]
        fds: list[int] = reply["fds"]
        try:
            own = POOL.get(reply["arena_id"])
            self.own = own is not None
            self.map = own.map if own is not None else mmap.mmap(fds[0], reply["size"], prot=mmap.PROT_READ)
            tail = mmap.mmap(fds[1], max(1, reply["tail_bytes"]), prot=mmap.PROT_READ)
        finally:
            for fd in fds:
                os.close(fd)
        self.files = [_bytes_of(self.map)[: self.sizes[0]], _bytes_of(tail)[: self.sizes[1]]]

    def whole(self) -> bool:
        return marks.whole(self.map, self.serial)

    def manifest(self) -> dict[str, Any]:
        files = [{"name": data_file(self.rank, i), "bytes": size} for i, size in enumerate(self.sizes)]
        return {"rank": self.rank, "files": files, "entries": self.entries}


def _bytes_of(memory: mmap.mmap) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and is only read
        return torch.frombuffer(memory, dtype=torch.uint8)


class MemoryIndex(Index):
    """What some ranks' shares hold. `world_size` is that of the world which made the version."""

    def __init__(self, shares: list[Share], world_size: int, what: str) -> None:
        super().__init__(Path(what), [share.manifest() for share in shares])
        self.world_size = world_size
        self.shares = shares
        self.memory = {data_file(s.rank, i): s.files[i] for s in shares for i in range(len(s.files))}

    def reader(self, rank: int, world_size: int) -> Reader:
        return MemoryReader(self, rank, world_size)


class MemoryReader(Reader):
    """Copies straight out of the arenas; whole shards go to any device in one piece."""

    index: MemoryIndex

    def _whole(self, chunk: Saved, local: torch.Tensor) -> bool:
        flat = self.index.memory[chunk.file][chunk.offset : chunk.offset + chunk.nbytes]
        self._after.append((local, flat.view(local.dtype).view(chunk.sizes)))
        return True

    def run(self) -> int:
        total = 0
        with torch.no_grad():
            for name, reads in self._reads.items():
                memory = self.index.memory[name]
                for read in reads:
                    read.target.copy_(memory[read.start : read.end])
                    total += read.end - read.start
            device = next((target.device for target, _source in self._after if target.is_cuda), None)
            with gpu.registered([s.files[0] for s in self.index.shares if not s.own], device):
                for target, source in self._after:
                    target.copy_(source, non_blocking=True)
                if device is not None:
                    torch.cuda.synchronize()
        for share in self.index.shares:
            if not share.whole():
                raise DamagedCheckpoint(
                    f"{self.index.folder}: rank {share.rank}'s share was overwritten while it was read"
                )
        self._after.clear()
        self._reads.clear()
        return total


def recall(
    root: Path,
    state: State,
    meeting: Meeting,
    older_than: int | None,
    missing_ok: tuple[str, ...],
    extra_ok: tuple[str, ...],
) -> tuple[Recalled | None, list[tuple[str, str]]]:
    """Fill `state` from the newest version in memory (None, on all ranks, if no memory holds one that can be used); and
    the (version, reason) of those passed over. No rank writes into its state before all have their shares. Raises
    CheckpointError, on all ranks, when one fails after that."""
    peers, client = meeting.peers, meeting.client

    def prepare(proposal: dict[str, Any], what: str) -> tuple[Filling, str]:
        shares = _shares(root, meeting, proposal)
        index = MemoryIndex(shares, proposal["world_size"], what)
        filling = Filling(state, index, peers.rank, peers.world_size, missing_ok, extra_ok)
        return filling, "own" if all(share.source == "own" for share in shares) else "peer"

    mine: list[dict[str, Any]] = []
    if meeting.speaks:
        reply = client.ask({"op": "inventory", "root": str(root)}, 5.0)
        mine = reply["versions"] if reply else []
    told = peers.gather("inventory", mine)
    candidates: list[dict[str, Any]] = []
    if peers.rank == 0:
        first = [meeting.nodes.index(node) for node in range(meeting.num_nodes)]
        candidates = held.newest_common([told[rank] for rank in first], older_than)
    rejected: list[tuple[str, str]] = []
    while True:
        proposal = peers.from_rank0("recall", candidates.pop(0) if candidates else None)
        if proposal is None:
            return None, rejected
        epoch, generation, step = proposal["key"]
        what = f"memory: step {step} of generation {epoch}.{generation}"
        found, failure = peers.together("recalled", functools.partial(prepare, proposal, what), _FAILURES)
        if found is None or failure is not None:
            if found is not None:
                found[0].undo()
            rejected.append((what, failure.text if failure is not None else ""))
            continue
        filling, source = found
        _, failure = peers.together("filled", filling.fill, _FAILURES)
        if failure is not None:
            raise CheckpointError(f"{what}: {failure.text}. {HALF_WRITTEN}")
        tier = "memory" if set(peers.gather("sources", source)) == {"own"} else "peer"
        key = (epoch, generation, step)
        return Recalled(key, tier, filling.missing, filling.extra, filling.notes), rejected


def _shares(root: Path, meeting: Meeting, proposal: dict[str, Any]) -> list[Share]:
    """This rank's own share, if it has all that the state needs; else every rank's."""
    rank, world = meeting.peers.rank, proposal["world_size"]

    def fetch(which: int) -> Share:
        message = {"op": "fetch", "root": str(root), "key": proposal["key"], "rank": which}
        holders = proposal["holders"].get(str(which), proposal["holders"].get(which))
        endpoints = [meeting.endpoints[node] for node in holders if meeting.endpoints[node]]
        reply = meeting.client.ask({**message, "endpoints": endpoints}, FETCH_LIMIT_S)
        if reply is None or "error" in reply:
            raise DamagedCheckpoint(
                f"rank {which}'s share: {reply['error'] if reply else 'the keeper does not answer'}"
            )
        share = Share(which, reply)
        if not share.whole():
            raise DamagedCheckpoint(f"rank {which}'s share is being overwritten")
        return share

    if world != meeting.peers.world_size:
        return [fetch(which) for which in range(world)]
    own = fetch(rank)
    if own.alone:
        return [own]
    return [own if which == rank else fetch(which) for which in range(world)]
