"""A rank missing in a collective: it leaves one out, goes on, and waits for the result that never comes.

What happens when a rank just leaves one out and goes on (torch 2.13, gloo, 4 ranks, FSDP2): its next collective takes
the number of the one left out, the peers pair the two, the sizes differ, and gloo's check (`op.preamble.length <=
op.nbytes`, tcp/pair.cc) throws in an I/O thread: SIGABRT within 30 ms, in forward of an *innocent* neighbour, in
backward of the guilty rank itself. That is a crash, not the hang we want to study; with equal sizes it would be silent
corruption.

So the guilty rank must issue nothing after the one it left out. Every collective issued from Python goes through a
method of `ProcessGroup`; the next one called in the main thread returns a handle without sending anything, and
the handle's `wait()` blocks. FSDP2 goes on past an asynchronous all-gather up to that wait; a synchronous collective
waits at once. Measured: the peers stay in the collective until their group's timeout or until they are cut out of it.

Collectives issued from C++ (DDP's reducer, functional collectives) are not seen here; if no other comes by within the
step, the fault waits at the start of the next step instead, and the peers wait in the first collective after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Collectives of `ProcessGroup` over the supported versions of torch; absent ones are left alone."""

_originals: dict[str, Any] = {}


class _NeverDone:
    """Stands in for the `Work` of the collective left out."""

    def __init__(self, name: str, wait: Callable[[str], None]) -> None:
        self._name = name
        self._wait = wait

    def wait(self, *timeout: Any) -> bool:
        self._wait(self._name)
        return True

    def is_completed(self) -> bool:
        return False


def arm(wait: Callable[[str], None]) -> bool:
    """Have the main thread's next collective left out; wait(name) is called where its result is waited for.

    Returns False, without arming, where torch has no process group. Main thread.
    """
    dist: Any = sys.modules.get("torch.distributed")  # a script without torch has no process group either
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    disarm()
    group_class: Any = dist.ProcessGroup
    for name in METHODS:
        if name in vars(group_class):
            _originals[name] = vars(group_class)[name]
            setattr(group_class, name, _leaving_out(name, _originals[name], wait))
    return True


def disarm() -> None:
    """Put the methods back; does nothing if nothing is armed."""
    for name, original in _originals.items():
        setattr(sys.modules["torch.distributed"].ProcessGroup, name, original)
    _originals.clear()


def is_armed() -> bool:
    """Whether a collective is still to be left out."""
    return bool(_originals)


def _leaving_out(name: str, original: Any, wait: Callable[[str], None]) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        # A wait in another thread (autograd's device thread, a saver) could not be ended by a signal: pass it on.
        if threading.current_thread() is not threading.main_thread():
            return original(group, *args, **kwargs)
        disarm()
        return _NeverDone(name, wait)

    return method
