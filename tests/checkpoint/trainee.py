"""Gloo ranks of a small job, forked from a process that has imported torch once; for the `ranks` fixture.

Reads one JSON request per line ({"specs": [[env, spec], ...], "out": folder, "timeout_s"}), forks a process per
rank, answers with their exit codes. A rank prints JSON lines into <out>/<index>.out.

spec: root, kind (fsdp | ddp | plain), total, every, keep, mode, die = {ranks, step, after}, durable = [steps],
generations, fault = step at which generation 0 is left, sleep = seconds per step, sleep_up_to = more of them by chance,
width, dropout, on_error, memory,
crowd = rank that has no slot for the last save,
spoil = rank whose share the keeper loses when generation 0 is left,
again = list of `memory` options of further Checkpointers, made, loaded twice and closed at the end
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ridethrough.checkpoint as rc
from ridethrough.checkpoint.arena import POOL
from ridethrough.checkpoint.client import any_client
from ridethrough.generation.peer import peer_credentials

spec, rank, world = {}, 0, 1


def say(**fields):
    print(json.dumps(fields), flush=True)


def build(kind, width, dropout=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * width, width - 1))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(nn.Sequential(model, nn.BatchNorm1d(width - 1)))
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(model, optimizer, full=False):
    found = hashlib.sha256()
    tensors = list(model.parameters()) + list(model.buffers())
    tensors += [v for s in optimizer.state.values() for _k, v in sorted(s.items())]
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.full_tensor() if full else tensor.to_local()
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def spoil_small_values():
    """Cuts what the keeper holds of this rank beside the tensors: it is found when the share is mapped."""
    keeper = any_client()
    keeper.ask({"op": "ping"}, 5.0)
    pid = peer_credentials(keeper._sock)[0]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "ridethrough-tail" in os.readlink(fd) and f"rank {rank}".encode() in fd.read_bytes():
            os.truncate(fd, 0)


def take_all_slots(checkpointer):
    """As if the keeper still needed them all."""
    checkpointer.fence()
    for ticket in checkpointer._tickets:  # theirs are free then
        ticket.committed(60)
    size = checkpointer._snapshotter.plan.image_bytes
    taken = []
    while (arena := POOL.acquire(size, checkpointer.slots)) is not None:
        taken.append(arena)
    return taken


def generation(number):
    os.environ["RIDETHROUGH_GENERATION"] = str(number)
    dist.init_process_group("gloo")
    width = spec.get("width", 32)
    model, optimizer = build(spec.get("kind", "fsdp"), width, spec.get("dropout", 0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.99**s)
    state = rc.State(model=model, optimizer=optimizer, schedule=schedule, note=f"rank {rank}")
    options = {k: spec[k] for k in ("every", "keep", "mode", "on_error", "keep_every", "memory") if k in spec}
    checkpointer = rc.Checkpointer(spec["root"], state, **options)
    report = checkpointer.load()
    say(
        loaded=report.step,
        source=report.source,
        tier=report.tier,
        rejected=report.rejected,
        note=state["note"],
        loaded_hash=digest(model, optimizer, full=True),
        notes=report.notes,
    )
    data = torch.Generator()
    losses = []
    for step in range(report.step + 1, spec["total"] + 1):
        data.manual_seed(step)
        # the global batch is the same whatever the world size
        batch = torch.randn(24, width, generator=data).chunk(world)[rank]
        loss = model(batch).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        if number == 0 and step == spec.get("fault"):
            checkpointer.abandon() if spec.get("abandon_one") else rc.abandon(number)
            if rank == spec.get("spoil"):
                spoil_small_values()
            return False
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        time.sleep(spec.get("sleep", 0.0) + random.Random(f"{rank} {step}").uniform(0.0, spec.get("sleep_up_to", 0.0)))
        crowd = rank == spec.get("crowd") and step == spec["total"]
        taken = crowd and take_all_slots(checkpointer)
        ticket = checkpointer.step(step)
        for arena in taken or ():
            POOL.release(arena.id, arena.serial)
        if step in spec.get("durable", []):
            checkpointer.save(step).committed(60)
        die = spec.get("die")
        if die and step == die["step"] and rank in die.get("ranks", [die.get("rank", 0)]):
            if ticket is not None:
                ticket.staged(20)
            time.sleep(die.get("after", 0.0))
            os.kill(os.getpid(), signal.SIGKILL)
    if losses:  # of the global batch
        losses = torch.stack(losses)
        dist.all_reduce(losses)
    say(losses=[float(each) / world for each in losses])
    say(hash=digest(model, optimizer), full_hash=digest(model, optimizer, full=True), draw=torch.rand(1).item())
    try:
        checkpointer.close(60)
    except rc.CheckpointError as error:
        say(error=str(error))
    say(figures=vars(checkpointer.figures))
    loads = []
    for memory in spec.get("again", []):
        state = rc.State(model=model, optimizer=optimizer, schedule=schedule, note=f"rank {rank}")
        checkpointer = rc.Checkpointer(spec["root"], state, memory=memory)
        for _ in range(2):
            report = checkpointer.load()
            loads.append([report.step, report.tier, digest(model, optimizer, full=True)])
        checkpointer.save(report.step + 1).committed(30)
        checkpointer.close(30)
    say(again=loads)
    return True


def one_rank(env, mine):
    global spec, rank, world
    os.environ.update(env)
    spec, rank, world = mine, int(env["RANK"]), int(env["WORLD_SIZE"])
    torch.set_num_threads(1)
    if os.environ.get("TRAINEE_OWN_HOST"):
        import ridethrough.checkpoint.checkpointer as inside

        inside.host_identity = lambda: f"host-{rank}"
    for number in range(spec.get("generations", 1)):
        done = generation(number)
        dist.destroy_process_group()
        if done:
            break
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def forked(index, env, mine, folder):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            fd = os.open(f"{folder}/{index}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, number)
            os.close(fd)
        one_rank(env, mine)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve():
    warnings.filterwarnings("ignore")
    for line in sys.stdin:
        request = json.loads(line)
        pids = [forked(i, env, mine, request["out"]) for i, (env, mine) in enumerate(request["specs"])]
        deadline = time.monotonic() + request["timeout_s"]
        codes = {}
        while len(codes) < len(pids):
            for pid in [p for p in pids if p not in codes]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        print(json.dumps([codes[p] for p in pids]), flush=True)


if __name__ == "__main__":
    serve()
