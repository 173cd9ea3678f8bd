"""A script's own `init_process_group` under `rt.run`: the group is there already, so a compatible call just returns.

Both `torch.distributed.init_process_group` and `destroy_process_group` are replaced once, when this module is imported;
where the launcher forks workers that is before the script is. Outside a generation, and after the script has destroyed
the group, a group is made as ever. A destroyed group is kept until the next is destroyed: what still refers to it, a
DDP reducer above all, dead-locks on the GIL when it is freed after the group's threads (seen in 1 of 3 ends of a script
that destroys the group and then lets go of its model).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

make: Callable[..., None] = c10d.init_process_group
unmake: Callable[..., None] = c10d.destroy_process_group
_kept: list[Any] = []
_ours: dict[str, Any] | None = None  # what the group that `rt.run` made is


def claim(rank: int, world_size: int) -> None:
    """The default group is ours from here on. Main thread."""
    global _ours
    _ours = {"rank": rank, "world_size": world_size, "backends": _backends(dist.get_backend_config())}


def release() -> None:
    """There is no group of ours. Main thread."""
    global _ours
    _ours = None


@functools.wraps(make)
def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Returns quietly if `rt.run` has made a group that serves this call; else makes it, as torch does. Raises
    ValueError if the two do not fit."""
    if _ours is None or not dist.is_initialized():
        return make(backend, *args, **kwargs)
    names = ("init_method", "timeout", "world_size", "rank")
    asked = {**dict(zip(names, args, strict=False)), **kwargs}
    wrong = []
    for name in ("world_size", "rank"):
        if asked.get(name) not in (None, -1, _ours[name]):
            wrong.append(f"{name} {asked[name]} (it is {_ours[name]})")
    more = _backends(backend or "") - _ours["backends"]
    if more:
        wrong.append(f"backend {backend} (it is {', '.join(sorted(_ours['backends']))})")
    if wrong:
        raise ValueError(
            f"init_process_group asks for {' and '.join(wrong)}, but rt.run has made the default group already: leave "
            "the call out, or use rt.run(train, process_group=False)"
        )
    return None


@functools.wraps(unmake)
def destroy_process_group(group: Any = None) -> None:
    """Destroys the group as torch does, but keeps a default group alive for those who still refer to it."""
    if dist.is_initialized() and group in (None, c10d.GroupMember.WORLD):
        _kept[:] = [c10d._get_default_group()]
    unmake(group)


def adopt(function: Callable[..., Any]) -> None:
    """Names that the script imported from torch before this module was there: in `__main__` and around `function`."""
    for names in (vars(sys.modules["__main__"]), getattr(function, "__globals__", {})):
        for name, value in list(names.items()):
            if value is make:
                names[name] = init_process_group
            elif value is unmake:
                names[name] = destroy_process_group


def _backends(text: str) -> set[str]:
    """`gloo`, or `cpu:gloo,cuda:nccl`: the backends' names."""
    return {part.rpartition(":")[2].strip().lower() for part in text.split(",") if part.strip()} - {"undefined"}


c10d.init_process_group = init_process_group
dist.init_process_group = init_process_group
c10d.destroy_process_group = destroy_process_group
dist.destroy_process_group = destroy_process_group
