"""One fault per generation on GPUs, ours beside NVRx's in-process restart, on one model:

    ridethrough run --nproc-per-node 2 --policy bench.json src/ridethrough/bench/gpu_ladder.py --out a.jsonl --reps 10
    torchrun --nproc-per-node 2 src/ridethrough/bench/gpu_ladder.py --mechanism nvrx-inprocess --out b.jsonl --reps 10

A transformer of about 0.4 B parameters with FSDP2 in bf16, no checkpoints: the time from the fault to the first step
done in the next generation, over all ranks. The file holds one JSON line per event; `python gpu_ladder.py --read FILE`
prints medians. Runs without ridethrough installed for the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpu_model import batch, build  # type: ignore[import-not-found]

KINDS = ("exception", "sigkill", "sigkill0", "sigkill_backward", "loop", "missing", "assert", "init")
FAULT_STEP = 14


class Log:
    """One JSON line per event, appended by every process; wall clock of one host."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"t": time.time(), "event": event, "pid": os.getpid(), **fields}) + "\n"
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, line.encode())
        os.close(fd)


def faults(args: argparse.Namespace) -> list[str]:
    return [kind for _ in range(args.reps) for kind in args.kinds.split(",")]


def strike(kind: str, moment: str, rank: int, last: int, args: argparse.Namespace, number: int) -> None:
    """Fires fault `number` if this is its rank and moment; once per job."""
    victim = 0 if kind == "sigkill0" else last
    due = {"init": "init", "sigkill_backward": "backward"}.get(kind, "step")
    if rank != victim or moment != due:
        return
    try:
        os.close(os.open(f"{args.out}.fired-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    Log(args.out)("fault", number=number, kind=kind, rank=rank)
    if kind.startswith("sigkill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "loop":
        while True:
            pass
    elif kind == "missing":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "assert":
        table = torch.zeros(4, device="cuda")
        table[torch.tensor([9], device="cuda")].sum().item()
    raise RuntimeError(f"injected {kind}")


def train(generation: int, rank: int, device: torch.device, args: argparse.Namespace, steps: Any, beat: Any) -> None:
    """`steps` yields step numbers; the number of faults that have fired tells which one is next."""
    log, plan = Log(args.out), faults(args)
    number = sum(os.path.exists(f"{args.out}.fired-{n}") for n in range(len(plan)))
    kind = plan[number] if number < len(plan) else ""
    last = dist.get_world_size() - 1
    strike(kind, "init", rank, last, args, number)
    model, optimizer = build(device, wrap=args.wrap, compiled=args.compile)
    torch.cuda.synchronize()
    log("built", generation=generation, rank=rank)
    for step in steps:
        x, y = batch(step, rank, device)
        if step == FAULT_STEP:
            strike(kind, "step", rank, last, args, number)
        loss = model(x, y)
        if step == FAULT_STEP:
            strike(kind, "backward", rank, last, args, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        beat()
        if step in (1, args.steps):
            log(
                "step",
                generation=generation,
                rank=rank,
                step=step,
                loss=value,
                number=number,
                gpu=torch.cuda.memory_allocated(),
                threads=threading.active_count(),
            )


def ours(args: argparse.Namespace) -> None:
    import ridethrough as rt

    def entry(run: rt.Run) -> None:
        train(run.generation, run.rank, run.device, args, run.steps(0, args.steps), lambda: None)

    rt.run(entry)


def nvrx(args: argparse.Namespace) -> None:
    import nvidia_resiliency_ext.inprocess as inprocess

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        "127.0.0.1",
        port + 2,
        int(os.environ["WORLD_SIZE"]),
        os.environ["RANK"] == "0",
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )

    def entry(call_wrapper: inprocess.CallWrapper = None) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore(str(call_wrapper.iteration), store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        train(call_wrapper.iteration + 1, rank, device, args, range(1, args.steps + 1), call_wrapper.ping)
        dist.destroy_process_group()

    entry.__annotations__ = {"call_wrapper": inprocess.CallWrapper}  # the wrapper looks for the type itself
    second = timedelta(seconds=1)
    inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        abort=inprocess.abort.AbortTorchDistributed(),
        monitor_thread_interval=second,
        monitor_process_interval=second,
        heartbeat_interval=second,
        progress_watchdog_interval=second,
        soft_timeout=60 * second,
        hard_timeout=90 * second,
        barrier_timeout=120 * second,
        heartbeat_timeout=30 * second,
        completion_timeout=120 * second,
        last_call_wait=second,
    )(entry)()


def read(path: str) -> None:
    """Prints, per kind: fault -> first step done by every rank; count, median, least and most, in seconds."""
    with open(path) as file:
        events = [json.loads(line) for line in file]
    by_kind: dict[str, list[float]] = {}
    for fault in (e for e in events if e["event"] == "fault"):
        done = [e for e in events if e["event"] == "step" and e["step"] == 1 and e["number"] == fault["number"] + 1]
        if done:
            by_kind.setdefault(fault["kind"], []).append(max(e["t"] for e in done) - fault["t"])
    for kind, seconds in by_kind.items():
        middle = statistics.median(seconds)
        print(f"{kind:18s} n {len(seconds):3d}  median {middle:.2f}  min {min(seconds):.2f}  max {max(seconds):.2f}")
    ends = [e for e in events if e["event"] == "step" and e["step"] > 1]
    print(
        f"runs to the end: {len(ends)}; GPU bytes then {sorted({e['gpu'] for e in ends})}; losses "
        f"{sorted({round(e['loss'], 6) for e in ends})}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mechanism", choices=("ridethrough", "nvrx-inprocess"), default="ridethrough")
    parser.add_argument("--out", default="gpu-ladder.jsonl")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wrap", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--read", metavar="FILE")
    args = parser.parse_args()
    if args.read:
        read(args.read)
        return
    (ours if args.mechanism == "ridethrough" else nvrx)(args)


if __name__ == "__main__":
    main()
