"""The process groups of one generation: made over a store of their own, cut from any thread, torn down in place."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ridethrough.restart.sockets import TcpSocket, shut_down, tcp_sockets

_ABORT_LIMIT_S = 3.0
_STORE_TIMEOUT_S = 60.0

_current: Groups | None = None
_hook_installed = False
# A group is dropped only after the next one has worked: DDP's reducer may still need the old one's threads, and its
# destructor dead-locks on the GIL if they are gone.
_graveyard: list[Any] = []


class Groups:
    """Makes the default group and watches the sockets of every other group that the training function makes."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._lock = threading.Lock()
        self._sockets: dict[int, TcpSocket] = {}
        self._store_sockets: dict[int, TcpSocket] = {}
        self._cut = False

    def open(
        self, *, host: str, prefix: str, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Connects to the store and makes the default group. Main thread; `cut` from another thread ends it early."""
        global _current
        _install_hook()
        _current = self
        before = tcp_sockets()
        timeout = datetime.timedelta(seconds=_STORE_TIMEOUT_S)
        client = dist.TCPStore(host, self._store_port, None, False, timeout, wait_for_workers=False)
        with self._lock:
            self._store_sockets = {i: s for i, s in tcp_sockets().items() if i not in before}
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        c10d.init_process_group(
            backend,
            store=dist.PrefixStore(prefix, client),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def opened(self, before: dict[int, TcpSocket]) -> None:
        """A group was made; what is new and no listener belongs to it, unless it leads to the store."""
        fresh = {
            i: s
            for i, s in tcp_sockets().items()
            if i not in before and not s.listening and self._store_port not in (s.local_port, s.remote_port)
        }
        with self._lock:
            self._sockets.update(fresh)
            if not self._cut:
                return
        shut_down(list(fresh.values()))

    def collectives(self) -> int:
        """How many collectives this rank has begun on the default group. Any thread."""
        try:
            group: Any = c10d._get_default_group()
            return int(group._get_sequence_number_for_group())
        except (RuntimeError, ValueError):
            return 0

    def cut(self) -> None:
        """Frees whoever is blocked in a collective or in the store, here and on the peers. Any thread, repeatable."""
        with self._lock:
            self._cut = True
            sockets = [*self._sockets.values(), *self._store_sockets.values()]
        shut_down(sockets)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _abort_nccl()

    def close(self) -> None:
        """Destroys every group after a cut and forgets whatever keeps the old mesh alive. Main thread."""
        global _current
        _current = None
        if dist.is_initialized():
            _graveyard.append(c10d._get_default_group())
            with contextlib.suppress(RuntimeError, ValueError):
                c10d.destroy_process_group()
        forget_meshes()
        gc.collect()

    @staticmethod
    def bury() -> None:
        """The new group has worked: the old ones may go. Main thread."""
        _graveyard.clear()


def _install_hook() -> None:
    """Every group passes through one private function of torch; ours notes the sockets around it."""
    global _hook_installed
    if _hook_installed:
        return
    _hook_installed = True
    inner = c10d._new_process_group_helper

    @functools.wraps(inner)
    def noting(*args: Any, **kwargs: Any) -> Any:
        groups = _current
        if groups is None:
            return inner(*args, **kwargs)
        before = tcp_sockets()
        try:
            return inner(*args, **kwargs)
        finally:
            groups.opened(before)

    c10d._new_process_group_helper = noting


def _abort_nccl() -> None:
    """Aborts all NCCL groups in parallel: one after the other, each waits for the others' peers."""
    threads = []
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort"):
                threads.append(threading.Thread(target=backend.abort, name="ridethrough-abort", daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_LIMIT_S)


def forget_meshes() -> None:
    """Drops DTensor's process-wide caches: they keep the old mesh, its groups, their threads and descriptors alive."""
    try:
        import torch.distributed.tensor.debug as debug
        from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
    except ImportError:
        return
    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(
            getattr(DTensor._op_dispatcher.sharding_propagator, "_propagate_tensor_meta_cached", None),
            "cache_clear",
            None,
        ),
    ):
        if clear is not None:
            clear()
    for module in (_redistribute, _collective_utils):
        for name, value in list(vars(module).items()):
            inner = list(vars(value).values()) if isinstance(value, type) else []
            for candidate in (value, *inner):
                function = getattr(candidate, "__func__", candidate)
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
            if "planner_cache" in name.lower() and hasattr(value, "clear"):
                value.clear()
