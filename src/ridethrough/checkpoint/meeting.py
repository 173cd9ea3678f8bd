"""Who takes part in a checkpointer's generation, who shares this node, and where its keeper listens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ridethrough.checkpoint.client import KeeperClient, any_client, client_for
from ridethrough.checkpoint.dcpindex_torch import trusted
from ridethrough.checkpoint.layout import Lineage
from ridethrough.checkpoint.peers import Peers, host_identity
from ridethrough.generation.socket_folder import hold, socket_folder


class Meeting:
    """Made once per checkpointer, by all ranks alike; a barrier. `nodes[i]` is the number of the node of rank i,
    counted in the order of their first ranks. Raises CheckpointTimeout and CheckpointError."""

    def __init__(self, timeout_s: float) -> None:
        self.peers = Peers(timeout_s)
        agent = os.environ.get("RIDETHROUGH_KEEPER")
        known = any_client()
        path = agent or (str(known.path) if known else None)
        told = self.peers.gather("nodes", [host_identity(), path, _endpoint(agent)])
        places = [(host, keeper if agent else "") for host, keeper, _endpoint in told]
        numbers: dict[tuple[str, str], int] = {}
        self.nodes = [numbers.setdefault(place, len(numbers)) for place in places]
        self.node = self.nodes[self.peers.rank]
        self.num_nodes = len(numbers)
        self.local_ranks = [r for r, node in enumerate(self.nodes) if node == self.node]
        self.first = self.local_ranks[0]
        self.endpoints = [told[self.nodes.index(node)][2] for node in range(self.num_nodes)]
        shared = next((p for r, (_h, p, _e) in enumerate(told) if self.nodes[r] == self.node and p), None)
        if shared is None:
            if self.peers.rank == self.first:
                shared = str(_own_keeper())
                self.peers.publish(f"keeper/{self.first}", shared)
            else:
                shared = self.peers.read(f"keeper/{self.first}")
        self.client: KeeperClient = client_for(Path(str(shared)), owned=agent is None)
        self.client.connect()

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.peers.rank == self.first

    def group(self, root: str, lineage: Lineage, options: dict[str, Any]) -> dict[str, Any]:
        """What the keeper is told before a generation's first snapshot."""
        return {
            "op": "group",
            "root": root,
            "lineage": lineage.attempt(0),
            "epoch": lineage.epoch,
            "generation": lineage.generation,
            "rank": self.peers.rank,
            "world_size": self.peers.world_size,
            "local_ranks": self.local_ranks,
            "node": self.node,
            "leader": self.nodes[0],
            "endpoints": self.endpoints,
            "options": {
                "epoch": lineage.epoch,
                "generation": lineage.generation,
                "nonce": lineage.nonce,
                "metadata_by_torch": not trusted(),
                **options,
            },
        }


def _own_keeper() -> Path:
    """Starts a keeper in a folder of its own, which it holds from then on; returns its socket's path."""
    folder = socket_folder()
    held = hold(folder)
    try:
        client_for(folder / "keeper.sock", owned=True).connect()
    finally:
        os.close(held)
    return folder / "keeper.sock"


def _endpoint(agent: str | None) -> str:
    """Where other nodes' keepers reach this node's; empty where it has no neighbours."""
    if not agent:
        return ""
    client = client_for(Path(agent), owned=False)
    client.connect()
    reply = client.ask({"op": "endpoint"}, 5.0)
    return str(reply.get("endpoint", "")) if reply else ""
