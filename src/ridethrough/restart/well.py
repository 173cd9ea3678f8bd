"""The health checks of one rank before it enters another generation, and which of them take its process out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ridethrough.generation.policy import Policy
from ridethrough.health import checks
from ridethrough.health.gpu import GpuBaseline, gpu_baseline, gpu_checks


@dataclass(frozen=True)
class Unfit:
    """What failed, for people. `node`: another node should have the place, else another process."""

    why: str
    node: bool


class Wellness:
    """Knows how the machine was at the start. Main thread; `look` takes `gate_limit_s` at most, `meet_gpu` no time."""

    def __init__(self, run_dir: Path | None, users: Callable[[], object] | None) -> None:
        self._run_dir, self._users = run_dir, users
        self._links = checks.links_up()
        self._gpu: GpuBaseline | None = None
        self._gpu_met = False

    def meet_gpu(self) -> None:
        """Once CUDA is up: notes how the GPU is before anything has happened to it. A driver may hang: in a thread."""
        if self._gpu_met or not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        self._gpu_met = True
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

        def meet() -> None:
            self._gpu = gpu_baseline(uuid)

        threading.Thread(target=meet, name="ridethrough-meet-gpu", daemon=True).start()

    def look(self, record: Callable[..., None], policy: Policy, why: str = "") -> Unfit | None:
        """Runs the checks and records each; None if nothing failed by which the policy takes anybody out. `why`: what
        speaks against this process already; the machine may be the cause of it."""
        chosen: dict[str, checks.Check] = {"memory": checks.memory, "nic": checks.links(self._links)}
        if self._run_dir is not None:
            chosen["disk"] = checks.disk(self._run_dir)
        if self._users is not None:
            chosen["user"] = checks.users_check(self._users)
        if self._gpu_met:
            chosen.update(gpu_checks(self._gpu))
        failed: dict[str, str] = {}
        for outcome in checks.run_checks(chosen, policy.gate_limit_s):
            record(
                "health",
                check=outcome.check,
                status=outcome.status,
                detail=outcome.detail,
                seconds=round(outcome.seconds, 4),
            )
            if outcome.status == "FAIL" and outcome.check in (*policy.evict_on, *policy.replace_process_on):
                failed[outcome.check] = f"check {outcome.check} failed: {outcome.detail}"
        reasons = [*([why] if why else []), *failed.values()]
        return Unfit("; ".join(reasons), node=not failed.keys().isdisjoint(policy.evict_on)) if reasons else None
