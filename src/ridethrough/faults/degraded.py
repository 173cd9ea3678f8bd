"""Ways to get worse without dying: a slow rank, memory that is short. Both end by themselves."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

from ridethrough.faults import hangs
from ridethrough.faults.shot import FaultRefused, Shot
from ridethrough.health.cgroup import available_memory_bytes


def slow(shot: Shot) -> None:
    """Sleep at each entry into a step, from here on for `num_steps` steps or to the generation's end."""
    last = shot.step + int(shot.args["num_steps"]) - 1
    extra_s = float(shot.args["extra_s"])

    def later(phase: str, step: int) -> bool:
        if phase == "step" and step <= last:
            hangs.sleep_s(extra_s)
        return step > last

    hangs.sleep_s(extra_s)
    shot.follow(later)


def guard_memory(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused if what would be taken is more than half of what is free here."""
    free = available_memory_bytes()
    if free is not None and _wanted_bytes(args) > free / 2:
        raise FaultRefused(
            f"fault kind memory_pressure: {args['mib']} MiB is more than half of the {free >> 20} MiB that are free: "
            "give less in args.mib, or use the kind oom, which is meant to be killed"
        )


def memory_pressure(shot: Shot) -> None:
    """Hold `mib` MiB of written memory for `num_steps` steps or to the generation's end."""
    last = shot.step + int(shot.args["num_steps"]) - 1
    held = mmap.mmap(-1, _wanted_bytes(shot.args), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, len(held), mmap.PAGESIZE):
        held[start] = 1

    def later(phase: str, step: int) -> bool:
        if step > last:
            held.close()
        return step > last

    shot.follow(later)


def _wanted_bytes(args: Mapping[str, Any]) -> int:
    return int(args["mib"]) << 20
