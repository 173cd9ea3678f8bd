"""How many snapshots of a state fit into host memory, decided before the first step and said with numbers.

With the memory tier a rank has the base, a candidate, the newest and the one being filled, and one more while a save is
written: 5 slots. On several nodes one more, since a node that does not lead keeps the two newest that wait for storage:
the leader may pick either. Less than 3 keep no promise.
"""

from __future__ import annotations

import torch

from ridethrough.checkpoint.arena import POOL, available_bytes
from ridethrough.checkpoint.errors import CheckpointError
from ridethrough.checkpoint.meeting import Meeting
from ridethrough.checkpoint.state import State, local_of

COMFORTABLE, LEAST = 5, 3
_MOMENTS = {"betas": 2, "momentum": 1, "alpha": 1, "lr_decay": 1}  # an option that tells of tensors like the parameter


def state_bytes(state: State) -> int:
    """This rank's share once all optimizers have made their state, which they do in their first step: an estimate."""
    total = sum(_nbytes(named.tensor) for named in state.tensors())
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            count = max((n for option, n in _MOMENTS.items() if group.get(option)), default=0)
            fresh = [p for p in group["params"] if not optimizer.state.get(p)]
            total += count * sum(_nbytes(p) for p in fresh)
    return total


def agreed_slots(state: State, meeting: Meeting, explicit: bool) -> tuple[int, str]:
    """`slots_for` this node, and the least of all nodes'. Training thread, alike on all ranks."""
    if meeting.num_nodes > 1 and not all(meeting.endpoints):
        slots, said = 0, "no memory tier: the nodes' keepers do not know each other; use `ridethrough run`"
    else:
        nbytes, comfortable = state_bytes(state), COMFORTABLE + (meeting.num_nodes > 1)
        slots, said = slots_for(nbytes, len(meeting.local_ranks), explicit, comfortable)
    return min(meeting.peers.gather("slots", slots)), said


def slots_for(nbytes: int, num_local: int, explicit: bool, comfortable: int = COMFORTABLE) -> tuple[int, str]:
    """(slots, what to say about them or ""): for `num_local` ranks of this node with `nbytes` each. 0 slots: the memory
    tier can't be had. Raises CheckpointError for that if it was asked for explicitly."""
    free, who = available_bytes()
    mine = POOL.bytes_held() + free // max(1, num_local)
    fits = mine // max(1, nbytes)
    if fits >= comfortable:
        return comfortable, ""
    numbers = f"a snapshot takes {nbytes} bytes on each of {num_local} ranks of this node, {who} has {free} bytes left"
    if fits >= LEAST:
        return int(fits), f"memory tier in tight mode, {fits} of {comfortable} slots: {numbers}"
    text = f"no memory tier: {numbers}, and {LEAST} snapshots are the least"
    if explicit:
        raise CheckpointError(f'{text}; give the job more memory, or memory="off"')
    return 0, text


def _nbytes(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()
