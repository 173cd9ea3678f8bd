"""How each mode of `ridethrough bench checkpoint` saves, says what is durable, and loads. Used by checkpoint_job.py.

Every mode is used as its own documentation shows it: asynchronous ones wait for their last save before the next.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import checkpoint_throttle as throttle  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

KEPT = 3
COMPARED_SNAPSHOTS = 2  # by a Checkpointer, once a generation


class Mode:
    """A save that blocks. `after_step` is called by every rank after every step."""

    def __init__(self, job: Any, root: Path, kept: int = KEPT) -> None:
        self.job, self.root, self.kept = job, root, kept
        self.durable_step = 0
        self.writes_s: list[float] = []
        self.prepare()

    def prepare(self) -> None:
        """Once, before any save."""

    def begin(self, interval: int) -> None:
        """A window begins: counts start anew."""
        self.writes_s = []

    def folder(self, step: int) -> Path:
        """A clean folder for a save, the same on all ranks; only the newest few are kept."""
        path = self.root / str(step)
        if self.job.rank == 0:
            path.mkdir(parents=True)
            for old in sorted(self.root.iterdir(), key=lambda p: int(p.name))[: -self.kept]:
                threading.Thread(target=shutil.rmtree, args=(old, True), name="bench-prune", daemon=True).start()
        dist.barrier()
        return path

    def write(self, folder: Path) -> None:
        raise NotImplementedError

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def save(self, step: int) -> None:
        begun = time.monotonic()
        self.write(self.folder(step))
        dist.barrier()
        self.writes_s.append(time.monotonic() - begun)
        self.durable_step = step

    def after_step(self, step: int, due: bool) -> None:
        if due:
            self.save(step)

    def newest_durable(self) -> int:
        return self.durable_step

    def finish(self) -> None:
        """Everything asked for is durable when this returns."""

    def counts(self) -> dict[str, float]:
        mean = sum(self.writes_s) / len(self.writes_s) if self.writes_s else 0.0
        return {"superseded": 0, "written": len(self.writes_s), "write_s": mean}

    def timed_save(self, step: int) -> float:
        begun = time.monotonic()
        self.save(step)
        self.finish()
        return time.monotonic() - begun

    def load(self) -> dict[str, torch.Tensor] | None:
        return self.read(self.root / str(self.durable_step))

    def close(self) -> None:
        """The end: helpers are stopped."""


class TorchSave(Mode):
    def file(self, folder: Path) -> Path:
        return folder / f"rank{self.job.rank}.pt"

    def write(self, folder: Path) -> None:
        if not throttle.rate():
            torch.save(self.job.locals(), self.file(folder))
            return
        file = throttle.SlowFile(str(self.file(folder)), self.job.world_size)
        torch.save(self.job.locals(), file)
        file.close()

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.file(folder))
        return found


class SlowFileSystem(FileSystem):
    """DCP's file system, throttled."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        with super().create_stream(path, mode) as stream:
            yield throttle.SlowFile(str(path), dist.get_world_size(), stream) if mode == "wb" else stream


class SlowWriter(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = SlowFileSystem()


class DcpSave(Mode):
    def where(self, folder: Path) -> dict[str, Any]:
        return {"storage_writer": SlowWriter(folder)} if throttle.rate() else {"checkpoint_id": folder}

    def write(self, folder: Path) -> None:
        dcp.save(self.job.sharded(), **self.where(folder))

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        fresh = {name: torch.empty_like(p.detach()) for name, p in self.job.sharded().items()}
        dcp.load(fresh, checkpoint_id=folder)
        return {name: self.job.local(tensor) for name, tensor in fresh.items()}


class DcpAsync(DcpSave):
    """A group of its own: on the default one the background's collectives would mix with training's."""

    process = False

    def prepare(self) -> None:
        self.group = None if self.process else dist.new_group(backend="gloo")
        self.pending: list[tuple[int, float, Any]] = []

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.finish()
        folder, begun = self.folder(step), time.monotonic()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        answer = dcp.async_save(
            self.job.sharded(), process_group=self.group, async_checkpointer_type=kind, **self.where(folder)
        )
        self.pending.append((step, begun, getattr(answer, "upload_completion", answer)))

    def newest_durable(self) -> int:
        if self.pending and self.pending[0][2].done():
            self._done()
        return self.durable_step

    def finish(self) -> None:
        if self.pending:
            self._done()

    def _done(self) -> None:
        step, begun, future = self.pending.pop()
        future.result()
        self.writes_s.append(time.monotonic() - begun)
        self.durable_step = step


class DcpAsyncProcess(DcpAsync):
    process = True


class NvrxAsync(TorchSave):
    """NVRx's TorchAsyncCheckpoint; of CPU tensors it gets a clone, for it copies them not at all and the checkpoint
    would be torn."""

    def prepare(self) -> None:
        if not torch.cuda.is_available():  # NVRx calls these whatever the device is
            torch.cuda.synchronize = lambda *args, **options: None
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        module: Any = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
        self.saver = module.TorchAsyncCheckpoint(persistent_queue=True)
        self.pending: list[tuple[int, float]] = []

    def save(self, step: int) -> None:
        self.finish()
        folder, begun = self.folder(step), time.monotonic()
        tensors = self.job.locals().items()
        copied = {name: tensor.clone() if tensor.device.type == "cpu" else tensor for name, tensor in tensors}
        path = str(self.file(folder))
        target = throttle.SlowFile(path, self.job.world_size) if throttle.rate() else path
        self.saver.async_save(copied, target)
        self.pending.append((step, begun))

    def after_step(self, step: int, due: bool) -> None:
        self.saver.finalize_async_save(blocking=False, no_dist=True)
        super().after_step(step, due)

    def newest_durable(self) -> int:
        queue: Any = getattr(self.saver, "async_calls_queue", getattr(self.saver, "_async_calls_queue", None))
        left = queue.get_num_unfinalized_calls() if hasattr(queue, "get_num_unfinalized_calls") else 1
        if self.pending and left == 0:
            self._done()
        return self.durable_step

    def finish(self) -> None:
        self.saver.finalize_async_save(blocking=True, no_dist=True)
        if self.pending:
            self._done()

    def _done(self) -> None:
        step, begun = self.pending.pop()
        self.writes_s.append(time.monotonic() - begun)
        self.durable_step = step

    def close(self) -> None:
        self.saver.finalize_async_save(blocking=True, no_dist=True, terminate=True)


class Ridethrough(Mode):
    mode = "async"
    memory: Any = "off"

    def prepare(self) -> None:
        import ridethrough as rt

        state = rt.State(model=self.job.model, optimizer=self.job.optimizer, rng=False)
        self.checkpointer = rt.Checkpointer(self.root, state, mode=self.mode, memory=self.memory)  # type: ignore[arg-type]
        self.checkpointer.load()
        self.tickets: list[Any] = []

    def begin(self, interval: int) -> None:
        """A new checkpointer makes its arenas at its first saves, and compares its first two snapshots whole: these are
        not counted, as the first save of all modes."""
        if self.mode == "async":
            for _ in range(COMPARED_SNAPSHOTS + 1):
                self.save(self.job.step)
                self.job.repeat_step()
                self.finish()
        self.tickets = []

    def save(self, step: int) -> None:
        self.tickets.append(self.checkpointer.save(step, durable=False))

    def after_step(self, step: int, due: bool) -> None:
        if due:
            self.save(step)
        else:
            self.checkpointer.step(step)

    def newest_durable(self) -> int:
        return int(self.checkpointer.figures.last_committed_step)

    def finish(self) -> None:
        """The last save of all must be durable, as at a job's end; the superseded ones stay superseded."""
        if not self.tickets:
            return
        self.tickets[-1].staged()
        if self.tickets[-1].committed(600.0) is None:
            self.tickets[-1] = self.checkpointer.save(self.tickets[-1].step, durable=True)
            self.tickets[-1].committed(600.0)

    def counts(self) -> dict[str, float]:
        written = [ticket.seconds for ticket in self.tickets if ticket.state == "committed"]
        mean = sum(written) / len(written) if written else 0.0
        return {"superseded": len(self.tickets) - len(written), "written": len(written), "write_s": mean}

    def load(self) -> dict[str, torch.Tensor] | None:
        import ridethrough as rt

        self.checkpointer.close()  # before somebody else claims the time line: what it still writes would be refused
        fresh = self.job.model.__class__()
        for name, p in self.job.model.named_parameters():
            fresh.register_parameter(name, torch.nn.Parameter(torch.empty_like(p.detach()), requires_grad=False))
        state = rt.State(model=fresh, optimizer=self.job.optimizer.__class__(fresh), rng=False)
        reader = rt.Checkpointer(self.root, state, memory="off")
        reader.load()
        reader.close()
        found = {name: self.job.local(p) for name, p in fresh.named_parameters()}
        self.prepare_again()
        return found

    def prepare_again(self) -> None:
        """Loading begins a new time line: who wants to go on saving begins one, too."""
        kept = {name: tensor.clone() for name, tensor in self.job.locals().items()}
        self.prepare()
        for name, tensor in self.job.locals().items():
            tensor.copy_(kept[name])

    def close(self) -> None:
        self.checkpointer.close()


class RidethroughSync(Ridethrough):
    mode = "sync"


class RidethroughMemory(Ridethrough):
    """A snapshot of every step in the keeper's memory, and the same durable saves."""

    memory = 1


MODES: dict[str, Callable[[Any, Path], Mode]] = {
    "torch-save": TorchSave,
    "dcp-save": DcpSave,
    "dcp-async": DcpAsync,
    "dcp-async-process": DcpAsyncProcess,
    "nvrx-async": NvrxAsync,
    "ridethrough": Ridethrough,
    "ridethrough-sync": RidethroughSync,
    "ridethrough-memory": RidethroughMemory,
}
