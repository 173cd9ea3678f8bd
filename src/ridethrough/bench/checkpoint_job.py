"""The job of `ridethrough bench checkpoint`, one process per rank: `python checkpoint_job.py SETTINGS.json`.

Needs torch, and what the measured mode needs. A state of DTensor parameters, sharded over the ranks as FSDP2 shards
them; an optimizer that changes every element after a save, so that a torn copy shows; a loop of steps that wait, as for
a GPU, or that keep a core busy. Each window is measured twice in a row: without saves (the control), then with.
Stall is what the saves add to the wall, whatever the save call itself says.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

PIECE_BYTES = 8 << 20
HEAD = 1024  # elements of each tensor that every step changes


class Counter(torch.optim.Optimizer):
    """Sets all of the state to the number of the step: everything right after a save, else each tensor's head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.number = 0.0
        self.all_of_it = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                local = Job.local(parameter).view(-1)
                (local if self.all_of_it else local[:HEAD]).fill_(self.number)


class Job:
    """State, compute and the loop. All times are of this rank; the job's are the slowest rank's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=600)
        dist.init_process_group("gloo", timeout=limit)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        mesh = DeviceMesh("cpu", list(range(self.world_size)))
        self.model = nn.Module()
        for index in range(max(1, settings["state_bytes"] // PIECE_BYTES)):
            local = torch.zeros(PIECE_BYTES // 4)
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            self.model.register_parameter(f"p{index}", nn.Parameter(whole, requires_grad=False))
        self.optimizer = Counter(self.model)
        self.bytes = PIECE_BYTES * len(self.optimizer.param_groups[0]["params"])
        self.step = 0
        self.last_full = 0
        self._left = torch.randn(256, 256)
        self._unit_s = self._time_of_unit()

    def locals(self) -> dict[str, torch.Tensor]:
        """Plain local tensors, by name: what modes save that know nothing of shards."""
        return {name: self.local(p) for name, p in self.model.named_parameters()}

    def sharded(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        return dict(self.model.named_parameters())

    @staticmethod
    def local(tensor: Any) -> torch.Tensor:
        """This rank's shard of a DTensor; the same memory."""
        shard: torch.Tensor = tensor.detach().to_local()
        return shard

    # --- compute -----------------------------------------------------------------------------------------------------

    def _unit(self) -> None:
        for _ in range(4):
            torch.mm(self._left, self._left)

    def _time_of_unit(self) -> float:
        """CPU seconds of a unit of work: wall would include what else runs on the machine."""
        self._unit()
        begun = time.process_time()
        for _ in range(40):
            self._unit()
        return (time.process_time() - begun) / 40

    def compute(self, seconds: float) -> None:
        if self.settings["compute"] == "wait":
            time.sleep(seconds)
            return
        for _ in range(max(1, round(seconds / self._unit_s))):
            self._unit()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, mode: Any, num_saves: int, interval: int, step_s: float) -> dict[str, Any]:
        """`num_saves` windows of `interval` steps, a save after each (none without a mode). Seconds and ages."""
        blocked, updating, ages = 0.0, 0.0, [0.0]
        ended_s: dict[int, float] = {}  # step -> when its state was complete
        cpu_s = self.cpu_s()
        dist.barrier()
        begun = time.monotonic()
        for index in range(num_saves * interval):
            self.compute(step_s)
            self.step += 1
            self.optimizer.number = float(self.step)
            self.optimizer.all_of_it = index % interval == 0
            if self.optimizer.all_of_it:
                self.last_full = self.step
            called = time.monotonic()
            self.optimizer.step()
            updating += time.monotonic() - called  # a copy that is not over holds the update back
            dist.all_reduce(torch.ones(1))  # ranks go together, as in training
            ended_s[self.step] = time.monotonic()
            if mode is not None:
                called = time.monotonic()
                mode.after_step(self.step, (index + 1) % interval == 0)
                blocked += time.monotonic() - called
                if index >= interval:
                    newest = mode.newest_durable()
                    ages.append(time.monotonic() - ended_s.get(newest, begun))
        dist.barrier()
        took = time.monotonic() - begun
        if mode is not None:
            mode.finish()
        dist.barrier()
        drained = time.monotonic() - begun - took
        return {
            "seconds": took,
            "blocked_s": blocked,
            "updating_s": updating,
            "freshness_s": max(ages),
            "drain_s": drained,
            "cpu_s": self.cpu_s() - cpu_s,
        }

    def repeat_step(self) -> None:
        """An optimizer's step that changes nothing."""
        self.optimizer.all_of_it = False
        self.optimizer.step()

    def cpu_s(self) -> float:
        """CPU seconds so far of every process of the job: ranks, keeper, writers. The same number on all ranks."""
        dist.barrier()
        total = torch.zeros(1, dtype=torch.float64)
        if self.rank == 0:
            mark = f"BENCH_MARK={os.environ['BENCH_MARK']}".encode()
            for name in os.listdir("/proc"):
                try:
                    if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
                        total += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
                except OSError:
                    continue
        dist.all_reduce(total)
        return float(total)

    def wrong_tensors(self, found: dict[str, torch.Tensor], saved_step: int, last_full: int) -> int:
        """How many of the loaded local tensors are not those of the saved step, over all ranks."""
        bad = 0
        for tensor in found.values():
            flat = tensor.view(-1)
            bad += not bool((flat[:HEAD] == saved_step).all()) or not bool((flat[HEAD:] == last_full).all())
        total = torch.tensor([bad])
        dist.all_reduce(total)
        return int(total)

    def slowest(self, values: dict[str, Any]) -> dict[str, Any]:
        """Each number as the largest of all ranks."""
        names = sorted(values)
        tensor = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return dict(zip(names, tensor.tolist(), strict=True))


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, str(Path(__file__).parent))
    import checkpoint_modes  # type: ignore[import-not-found]

    job = Job(settings)
    root = Path(settings["out"]) / "saves"
    mode = checkpoint_modes.MODES[settings["mode"]](job, root)
    job.step = 1
    job.optimizer.number, job.last_full = 1.0, 1
    job.optimizer.step()
    write_s = job.slowest({"t": mode.timed_save(1)})["t"]  # the first also sets things up; not counted
    if settings["mode"] == "dcp-save" and settings["write_s"] is None:
        times = []
        for _ in range(3):
            job.step += 1
            times.append(job.slowest({"t": mode.timed_save(job.step)})["t"])
        write_s = sorted(times)[1]
        report(job, {"write_s": write_s})
    else:
        for window in settings["windows"]:
            report(job, measure(job, mode, window, settings["saves"], settings["interval"], settings["write_s"]))
        mode.close()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the teardown of helpers that some modes leave behind


def measure(job: Job, mode: Any, window: float, num_saves: int, interval: int, write_s: float) -> dict[str, Any]:
    """One row: the control, the same with saves, and the last save loaded and compared."""
    step_s = window * write_s / interval
    before = job.slowest(job.loop(None, num_saves, interval, step_s))
    mode.begin(interval)
    row = job.slowest(job.loop(mode, num_saves, interval, step_s))
    saved = (job.step, job.last_full)
    counts = job.slowest(mode.counts())
    after = job.slowest(job.loop(None, 1, interval, step_s))  # the control again: the machine may have changed
    controls = [before["seconds"] / num_saves, after["seconds"]]
    control_s = min(controls) * num_saves
    begun = time.monotonic()
    found = mode.load()
    load_s = job.slowest({"t": time.monotonic() - begun})["t"]
    wrong = job.wrong_tensors(found, *saved) if found is not None else None
    total_gb = job.bytes * job.world_size * counts["written"] / 1e9
    cpu_s = row["cpu_s"] - before["cpu_s"]
    return {
        "window": window,
        "interval_steps": interval,
        "num_saves": num_saves,
        "control_s": control_s,
        "control_spread": max(controls) / min(controls),
        "seconds": row["seconds"],
        "efficiency": control_s / row["seconds"],
        "added_s_per_save": (row["seconds"] - control_s) / num_saves,
        "blocked_s_per_save": (row["blocked_s"] + max(0.0, row["updating_s"] - before["updating_s"])) / num_saves,
        "drain_s": row["drain_s"],
        "write_s": counts["write_s"],
        "freshness_s": row["freshness_s"],
        # Two writes and an interval as it really was; ages are looked at once a step, so one step more.
        "freshness_bound_s": 2 * counts["write_s"] + row["seconds"] / num_saves * (1 + 1 / interval),
        "superseded": int(counts["superseded"]),
        "written": int(counts["written"]),
        "cpu_s_per_gb": cpu_s / total_gb if total_gb else None,
        "load_s": load_s if found is not None else None,
        "wrong_tensors": wrong,
    }


def report(job: Job, row: dict[str, Any]) -> None:
    if job.rank == 0:
        print("RESULT " + json.dumps(row), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
