"""The job that `ridethrough bench recovery` runs under every mechanism: `python workload.py SETTINGS.json`.

It needs torch and nothing else, so that it runs as it is in a peer's environment: a transformer under DDP and gloo,
AdamW, a checkpoint every few steps, one planned fault. What happens is written by the same lines of code under every
mechanism, as events of the ledger, one file per process: that is the only thing that is measured. What differs
between the mechanisms (how the training function is entered and left) is in workload_entries.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCABULARY = 4096
SEQUENCE = 17


class Settings:
    """The content of SETTINGS.json; see `recovery_job.py`, which writes it."""

    def __init__(self, path: str) -> None:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        self.mechanism: str = values["mechanism"]
        self.out = Path(values["out"])
        self.world_size: int = values["world_size"]
        self.steps: int = values["steps"]
        self.save_every: int = values["save_every"]
        self.dim: int = values["dim"]
        self.layers: int = values["layers"]
        self.timeout_s: float = values["timeout_s"]
        self.own_checkpoint: bool = values["own_checkpoint"]
        self.straggle_s: float = values["straggle_s"]
        self.fault: dict[str, Any] | None = values["fault"]


class Log:
    """Appends events of the ledger; each is one write, so that a SIGKILL loses none. `waiting_ns`: since when this rank
    has computed its gradients and waits for its peers' in the backward pass; None elsewhere."""

    def __init__(self, out: Path) -> None:
        folder = out / "events"
        folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        path = folder / f"{host}-worker-{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.rank = int(os.environ.get("RANK", "0"))
        self.generation = 0
        self.waiting_ns: int | None = None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        header = {"schema": 1, "role": "worker", "host": host, "pid": os.getpid(), "boot_id": boot, "version": "bench"}
        self.emit("header", mono_ns=time.monotonic_ns(), wall_ns=time.time_ns(), **header)
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        self.emit("process", pid=os.getpid(), begun_ns=round(ticks / os.sysconf("SC_CLK_TCK") * 1e9))

    def emit(self, kind: str, **fields: Any) -> None:
        """One event; `t_ns` is now unless given. Any thread."""
        where = {"generation": self.generation, "rank": self.rank}
        event = {"kind": kind, "t_ns": time.monotonic_ns(), **where, **fields}
        os.write(self._fd, (json.dumps(event) + "\n").encode())


class Roll:
    """Says that this process exists; the bench watches it from then on and notes when the kernel ended it."""

    def __init__(self, out: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(out / "roll"))
        except OSError:
            print("workload: nobody calls the roll", file=sys.stderr)


class Job:
    """One process of the job: settings, log, and what every mechanism does alike."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log = Log(settings.out)
        self.roll = Roll(settings.out)

    # --- the model ---------------------------------------------------------------------------------------------------

    def build(self) -> tuple[Any, Any]:
        """Model and optimizer, the same on every rank: 20 M parameters at the default size."""
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(1234)
        dim, layers = self.settings.dim, self.settings.layers
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        model = nn.Sequential(nn.Embedding(VOCABULARY, dim), body, nn.Linear(dim, VOCABULARY))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train_step(self, model: Any, optimizer: Any, step: int) -> float:
        """Forward, backward, update; the fault may strike at the entry of any of them."""
        import torch
        import torch.nn.functional as functional

        rank = self.log.rank
        draw = torch.Generator().manual_seed(step * 1000 + rank)
        batch = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=draw)
        optimizer.zero_grad()
        self.strike("forward", step)
        logits = model(batch[:, :-1])
        loss: Any = functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        self.strike("backward", step)
        loss.backward()
        self.log.waiting_ns = None
        self.strike("optimizer", step)
        optimizer.step()
        return float(loss.item())

    # --- one generation ----------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """The group is up when this returns: its first collective gives the generation a number all ranks share."""
        import torch
        import torch.distributed as dist

        newest = torch.tensor([time.monotonic_ns()])
        dist.all_reduce(newest, dist.ReduceOp.MAX)
        self.log.generation = int(newest.item())

    def train(
        self,
        make: Callable[[], tuple[Any, Any]],
        steps: Callable[[int], Iterator[int]] | None = None,
        beat: Callable[[], None] = lambda: None,
        load: Callable[[Any, Any], int] | None = None,
    ) -> None:
        """The training function, entered with a process group that is up. `make` gives model and optimizer. `load`
        and `steps` of a mechanism with checkpoints of its own replace torch's; `beat` is called in each step."""
        import torch

        self.agree()
        log, settings = self.log, self.settings
        log.waiting_ns = None
        log.emit("enter")
        model, optimizer = make()
        model[0].weight.register_post_accumulate_grad_hook(self._computed)  # the last one in the backward pass
        log.emit("phase", phase="load", edge="begin", step=0)
        start = (load or self._load)(model, optimizer)
        log.emit("phase", phase="load", edge="end", step=start)
        log.emit("resumed", step=start)
        # With find_unused_parameters DDP keeps its first buckets. Else it makes others after the first step, gloo adds
        # in another order, and a job that was restarted would not end in the bits of one that was not.
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        log.emit("loop", step=start)
        begun_ns = time.monotonic_ns()
        for step in steps(start) if steps is not None else range(start + 1, settings.steps + 1):
            beat()
            loss = self.train_step(wrapped, optimizer, step)
            begun_ns = self._ended(step, begun_ns, loss)
            if steps is None and step % settings.save_every == 0:
                begun_ns = self._save(model, optimizer, step)
        log.emit("finish", step=settings.steps)
        if log.rank == 0:
            log.emit("final", final_hash=digest(model, optimizer), final_loss=loss)

    def _computed(self, weight: Any) -> None:
        self.log.waiting_ns = time.monotonic_ns()

    def _ended(self, step: int, begun_ns: int, loss: float) -> int:
        now = time.monotonic_ns()
        self.log.emit("step", step=step, t0_ns=begun_ns, t1_ns=now, parts=[], loss=loss)
        return now

    def _save(self, model: Any, optimizer: Any, step: int) -> int:
        """Rank 0 writes, the others wait for it."""
        import torch
        import torch.distributed as dist

        self.log.emit("phase", phase="save", edge="begin", step=step)
        if self.log.rank == 0:
            path = self.settings.out / "checkpoint.pt"
            draft = path.with_suffix(".draft")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
            os.replace(draft, path)
        dist.barrier()
        self.log.emit("phase", phase="save", edge="end", step=step)
        return time.monotonic_ns()

    def _load(self, model: Any, optimizer: Any) -> int:
        import torch

        path = self.settings.out / "checkpoint.pt"
        if not path.exists():
            return 0
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return int(found["step"])

    # --- the fault ---------------------------------------------------------------------------------------------------

    def strike(self, phase: str, step: int) -> None:
        """Fires the planned fault here if it is due, once per job."""
        fault = self.settings.fault
        if fault is None or (fault["rank"], fault["step"], fault["phase"]) != (self.log.rank, step, phase):
            return
        try:
            os.close(os.open(self.settings.out / "fired", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
        time.sleep(self.settings.straggle_s)
        kind, args = fault["kind"], fault["args"]
        self.log.emit("fault_injected", id=fault["id"], fault_kind=kind, phase=phase, step=step)
        FAULTS[args["variant"] if kind == "hang" else kind](args)


def _raise(args: dict[str, Any]) -> None:
    raise RuntimeError("injected fault")


def _loop(args: dict[str, Any]) -> None:
    while True:
        pass


def _wait(args: dict[str, Any]) -> None:
    """A lock that nobody frees; also stands for a collective left out, since the peers wait in theirs either way."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _end(number: int) -> Callable[[dict[str, Any]], None]:
    def end(args: dict[str, Any]) -> None:
        os.kill(os.getpid(), number)
        time.sleep(3600)

    return end


def _end_node(args: dict[str, Any]) -> None:
    """Ends every process that carries this node's mark, this one last."""
    mark = f"BENCH_NODE={os.environ['BENCH_NODE']}".encode()
    for name in os.listdir("/proc"):
        try:
            found = name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if found and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "exception": _raise,
    "hang_loop": _loop,
    "hang_lock": _wait,
    "hang_skip_collective": _wait,
    "sigkill": _end(signal.SIGKILL),
    "sigstop": _end(signal.SIGSTOP),
    "sigsegv": _end(signal.SIGSEGV),
    "exit": lambda args: os._exit(int(args.get("code", 17))),
    "node_loss": _end_node,
}


def digest(model: Any, optimizer: Any) -> str:
    """Hash of every bit of parameters and optimizer state."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().numpy().tobytes())
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        found.update(str(index).encode())
        for name in sorted(state):
            found.update(state[name].detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import workload_entries  # type: ignore[import-not-found]

    settings = Settings(sys.argv[1])
    workload_entries.ENTRIES[settings.mechanism](Job(settings))


if __name__ == "__main__":
    main()
