"""DataLoader workers belong to the generation that made them: they end with it, at once.

Torch ends them when the iterator is freed, by asking each and waiting for it; a worker that is in the middle of a batch
makes that take seconds. Here they are asked together, and those that have not ended shortly after are killed, once
torch has been told not to take their death for a fault.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from typing import Any

_ASKED_S = 0.2  # for all together: who is idle ends within milliseconds and cleans up behind itself
_KILLED_S = 0.5
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_hook_installed = False


def attend() -> None:
    """From here on iterators are noted: they belong to the generation that begins. Main thread."""
    global _hook_installed
    _iterators.clear()
    if _hook_installed:
        return
    _hook_installed = True
    from torch.utils.data import dataloader

    inner = dataloader._MultiProcessingDataLoaderIter.__init__

    def noting(self: Any, loader: Any) -> None:
        _iterators.add(self)
        _owners[self] = weakref.ref(loader)
        inner(self, loader)

    dataloader._MultiProcessingDataLoaderIter.__init__ = noting  # type: ignore[method-assign]


def end_workers() -> int:
    """Ends the workers of every iterator made in this generation; returns how many. Main thread."""
    count = 0
    for iterator in list(_iterators):
        workers = getattr(iterator, "_workers", [])
        if getattr(iterator, "_shutdown", True) and not any(w.is_alive() for w in workers):
            continue
        _forget(iterator)
        end = time.monotonic() + _ASKED_S
        for worker in workers:
            _wait(worker, end - time.monotonic())
        for worker in workers:
            with contextlib.suppress(ValueError, AttributeError):
                worker.kill()
                count += 1
            _wait(worker, _KILLED_S)
        for queue in getattr(iterator, "_index_queues", []):
            queue.cancel_join_thread()
            queue.close()
        owner = _owners.get(iterator)
        loader = owner() if owner is not None else None
        if loader is not None and getattr(loader, "_iterator", None) is iterator:
            loader._iterator = None  # a loader with persistent workers outside the function makes new ones
    _iterators.clear()
    return count


def _forget(iterator: Any) -> None:
    """Takes the iterator's own shutdown, and the death watch over its workers, out of the way."""
    signal_handling = sys.modules["torch.utils.data._utils.signal_handling"]
    iterator._shutdown = True
    for name in ("_pin_memory_thread_done_event", "_workers_done_event"):
        event = getattr(iterator, name, None)
        if event is not None:
            event.set()
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for queue in getattr(iterator, "_index_queues", []):
        with contextlib.suppress(ValueError, OSError):
            queue.put(None)


def _wait(worker: Any, seconds: float) -> None:
    with contextlib.suppress(ValueError, AssertionError, AttributeError):
        worker.join(max(0.0, seconds))
