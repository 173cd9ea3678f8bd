"""The process groups of one generation: made over a store of their own, cut from any thread, torn down in place."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import socket
import sys
import threading
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ridethrough.restart import script_groups
from ridethrough.restart.sockets import (
    GlooLoop,
    TcpSocket,
    connections,
    event_loops,
    gloo_loops,
    shut_down,
    stop_receiving,
    tcp_sockets,
)

_STORE_TIMEOUT_S = 60.0

_current: Groups | None = None
_hook_installed = False
# A group is dropped only after the next one has worked: DDP's reducer may still need the old one's threads, and its
# destructor dead-locks on the GIL if they are gone.
_graveyard: list[Any] = []
_held: list[socket.socket] = []  # of the groups in the graveyard: peers may still be inside


class Groups:
    """Makes the default group and knows the connections of every other group that the training function makes."""

    def __init__(self, store_port: int, abort_limit_s: float) -> None:
        self._store_port = store_port
        self.abort_limit_s = abort_limit_s
        self._lock = threading.Lock()
        self._loops: list[GlooLoop] = []
        self._others: list[TcpSocket] = []  # of groups without a loop that we can look into
        self._opening: set[int] | None = None
        self._store_sockets: list[TcpSocket] = []
        self._ended: dict[int, socket.socket] = {}
        self._keys: dict[str, int] = {}
        self._cut = False
        self.aborted = True  # NCCL's abort came to its end in time

    def attend(self) -> None:
        """From here on groups that the script makes are ours to cut. Main thread."""
        global _current
        _install_hook()
        _current = self

    def open(
        self, *, host: str, prefix: str, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Connects to the store, makes the default group and tries it with a first collective. Main thread; `cut` from
        another thread ends it early."""
        store: dist.Store
        if self._store_port == 0:
            store = dist.HashStore()
        else:
            before = tcp_sockets()
            timeout = datetime.timedelta(seconds=_STORE_TIMEOUT_S)
            store = dist.TCPStore(host, self._store_port, None, False, timeout, wait_for_workers=False)
            with self._lock:
                self._store_sockets = [
                    s for i, s in tcp_sockets().items() if i not in before and s.remote_port == self._store_port
                ]
                if self._cut:
                    shut_down(self._store_sockets)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        script_groups.make(
            backend,
            store=dist.PrefixStore(prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        dist.all_reduce(torch.ones(1))
        if device.type == "cuda":
            dist.all_reduce(torch.ones(1, device=device))
            torch.cuda.synchronize(device)

    def opening(self, begins: bool) -> None:
        """Around the making of a group. Main thread."""
        if begins:
            before = event_loops()
            with self._lock:
                self._opening = before
            return
        with self._lock:
            loops = gloo_loops(self._opening or set())
            self._opening = None
            self._loops += loops
            if self._cut:
                self._end(connections(loops))

    def made(self, before: dict[int, TcpSocket]) -> None:
        """Where the kernel does not list what a loop watches: what is new and no listener belongs to the group."""
        fresh = [
            s
            for i, s in tcp_sockets().items()
            if i not in before and not s.listening and self._store_port not in (s.local_port, s.remote_port)
        ]
        with self._lock:
            if self._loops:
                return
            self._others += fresh
            if self._cut:
                self._end(fresh)

    def collectives(self) -> list[tuple[int, int]]:
        """(key, collectives begun) of each group that this rank is in; members of a group give it the same key. Any
        thread."""
        world: Any = c10d._world
        found = []
        for group, name in list(world.pg_names.items()):
            try:
                key = self._keys.get(name)
                if key is None:
                    ranks = sorted(world.pg_group_ranks[group])
                    key = self._keys[name] = zlib.crc32(f"{name}:{ranks}".encode())
                found.append((key, int(group._get_sequence_number_for_group())))
            except (RuntimeError, ValueError, KeyError, AttributeError):
                continue
        return found

    def cut(self) -> None:
        """Frees the main thread if it is blocked in a collective or in the store. Any thread, repeatable."""
        self.cut_connections()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.aborted = _abort_nccl(self.abort_limit_s)

    def cut_connections(self) -> None:
        """The part of `cut` that may be repeated until the main thread is out. Any thread."""
        with self._lock:
            self._cut = True
            loops = [*self._loops, *(gloo_loops(self._opening) if self._opening is not None else [])]
            self._end([*connections(loops), *self._others])
            shut_down(self._store_sockets)

    def _end(self, sockets: list[TcpSocket]) -> None:
        """With the lock held."""
        self._ended.update(stop_receiving(s for s in sockets if s.inode not in self._ended))

    def close(self) -> None:
        """Destroys every group after a cut and forgets whatever keeps the old mesh alive. Main thread."""
        global _current
        _current = None
        self.bury()
        _held.extend(self._ended.values())
        if dist.is_initialized():
            _graveyard.append(c10d._get_default_group())
            with contextlib.suppress(RuntimeError, ValueError):
                c10d.destroy_process_group()
        # A group that failed while it was made has used up a name: a new process would count from 0, and the two would
        # never meet in the store.
        c10d._world.group_count = 0
        forget_meshes()

    @staticmethod
    def bury() -> None:
        """The new group has worked, or has failed too: the old ones may go. Main thread."""
        _graveyard.clear()
        while _held:
            _held.pop().close()


def _install_hook() -> None:
    """Every group passes through one private function of torch; ours notes the event loops around it."""
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
        groups.opening(True)
        try:
            return inner(*args, **kwargs)
        finally:
            groups.opening(False)
            groups.made(before)

    c10d._new_process_group_helper = noting


def _abort_nccl(limit_s: float) -> bool:
    """Aborts all NCCL groups in parallel: one after the other, each waits for the others' peers. False: one failed, or
    did not end in time."""
    done: list[None] = []
    threads = []

    def abort(backend: Any) -> None:
        backend.abort()
        done.append(None)

    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort"):
                threads.append(threading.Thread(target=abort, args=(backend,), name="ridethrough-abort", daemon=True))
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return len(done) == len(threads)


def forget_meshes() -> None:
    """Drops DTensor's caches, which keep old meshes alive, and the groups of meshes that stay alive all the same, with
    their threads and descriptors: torch 2.11 never gives back a reference to an operator's arguments."""
    if "torch.distributed.tensor._redistribute" not in sys.modules:
        return  # nobody has used it; to import it takes seconds
    import torch.distributed.tensor.debug as debug
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

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
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
