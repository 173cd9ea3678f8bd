"""What scripts do around their steps: own groups, loaders, sockets, call-backs, sections that must not be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


_AROUND = """
import multiprocessing, os, socket, threading, time
import torch
import torch.distributed as dist
from torch.distributed import init_process_group
import ridethrough as rt

server = socket.create_server(("127.0.0.1", 0))
tracked, stop_tracking, left, marks, workers = [], threading.Event(), [], [], set()

def track():
    while not stop_tracking.is_set():
        client = socket.create_connection(server.getsockname())
        tracked.append((client, server.accept()[0]))
        time.sleep(0.002)

threading.Thread(target=track, daemon=True).start()

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

@rt.restartable
def main(run):
    init_process_group("gloo")  # the script's own: it fits, so nothing happens
    try:
        init_process_group("gloo", world_size=7)
        raise AssertionError("world_size 7 was taken")
    except ValueError as error:
        assert "world_size 7 (it is 2)" in str(error)
    stop_tracking.set()
    run.on_leave(lambda: left.append(run.generation))
    assert not [pid for pid in workers if alive(pid)], "workers of the last generation are alive"
    loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=2, num_workers=2)
    batches = iter(loader)
    for step in run.steps(0, 12):
        next(batches)
        workers.update(p.pid for p in multiprocessing.active_children())
        dist.all_reduce(torch.ones(1))
        if run.generation == 1 and step == 6:
            if run.rank == 1:
                time.sleep(0.1)
                raise ValueError("once")
            with run.uninterrupted():
                end = time.monotonic() + 0.8
                while time.monotonic() < end:
                    pass
                marks.append("whole")
            raise AssertionError("it should have left here")
    return "result"

assert main() == "result"
for client, accepted in tracked:
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
rank = int(os.environ["RANK"])
assert left == [1], left
assert marks == (["whole"] if rank == 0 else []), marks
print("tracked", len(tracked) > 10, flush=True)
"""


def test_what_belongs_to_the_script_lives_on_and_what_belongs_to_the_generation_ends(jobs: Any, tmp_path: Path) -> None:
    job = jobs(script(tmp_path, _AROUND), ranks=2)
    assert job.code == 0, job.out
    assert job.out.count("tracked True") == 2
    assert job.told("class", "rank", "rung") == [("exception", 1, "in_process")]


_TUTORIAL = """
import os, tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

def setup():
    dist.init_process_group("gloo")

def cleanup():
    dist.destroy_process_group()

def demo_basic(flag):
    setup()
    rank = dist.get_rank()
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for step in range(12):
        if step == 6 and rank == 1 and not os.path.exists(flag):
            open(flag, "w").close()
            raise RuntimeError("once")
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss_fn(outputs, labels).backward()
        optimizer.step()
    cleanup()
    print(f"Finished running basic DDP example on rank {rank}.", flush=True)
"""


def test_a_tutorial_script_that_knows_nothing_of_us_is_started_anew_as_a_whole(jobs: Any, tmp_path: Path) -> None:
    text = _TUTORIAL + f"\ndemo_basic({str(tmp_path / 'flag')!r})\n"
    job = jobs(script(tmp_path, text), ranks=2)
    assert job.code == 0, job.out
    assert job.out.count("Finished running") == 2
    assert job.spawns() == {0: 2, 1: 2}


@pytest.mark.parametrize("process_group", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_its_function_under_rt_run_is_restarted_in_place(jobs: Any, tmp_path: Path, process_group: bool) -> None:
    text = _TUTORIAL.replace("for step in range(12):", "for step in run.steps(0, 12):")
    text = text.replace("demo_basic(flag)", "demo_basic(flag, run)")
    text += f"\nimport ridethrough as rt\nflag = {str(tmp_path / 'flag')!r}\n"
    text += f"rt.run(lambda run: demo_basic(flag, run), process_group={process_group})\n"
    job = jobs(script(tmp_path, text), ranks=2)
    assert job.code == 0, job.out
    assert job.out.count("Finished running") == 2
    assert job.spawns() == {0: 1, 1: 1}
    assert job.told("class", "rank", "rung") == [("exception", 1, "in_process")]


_HEARTBEATS = """
import os, sys, time
import ridethrough as rt

flag = sys.argv[1]
for step in range(20):
    rt.heartbeat(step)
    time.sleep(0.05)
    if step == 10 and os.environ["RANK"] == "1" and not os.path.exists(flag):
        open(flag, "w").close()
        time.sleep(3600)
print("through", flush=True)
"""


def test_a_script_with_heartbeats_alone_is_killed_when_they_stop(jobs: Any, tmp_path: Path) -> None:
    job = jobs(script(tmp_path, _HEARTBEATS), str(tmp_path / "flag"), ranks=2, policy={"heartbeat_limit_s": 1.5})
    assert job.code == 0, job.out
    assert job.told("class", "rank") == [("hang", 1)]
    assert "no heartbeat for" in job.incidents[0]["why"]


_NATIVE = """
import ctypes, os, signal, time
import ridethrough as rt

def dead_lock():
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)

what = {
    "0": (6, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "1": (9, dead_lock),
    "2": (12, lambda: ctypes.string_at(0)),
}
at, fail = what.get(os.environ["TORCHELASTIC_RESTART_COUNT"], (0, None))
for step in range(20):
    rt.heartbeat(step)
    time.sleep(0.05)
    if step == at and os.environ["RANK"] == "1" and fail is not None:
        fail()
print("through", flush=True)
"""


@pytest.mark.campaign
def test_without_rt_run_a_stop_a_native_dead_lock_and_a_crash_are_found(jobs: Any, tmp_path: Path) -> None:
    job = jobs(script(tmp_path, _NATIVE), ranks=2, policy={"heartbeat_limit_s": 3.0})
    assert job.code == 0, job.out
    assert job.told("class", "rank", "step") == [("hang", 1, 6), ("hang", 1, 9), ("sigsegv", 1, 12)]
    assert job.spawns() == {0: 4, 1: 4}


_STUCK_AT_EXIT = """
import atexit, threading, time
import torch, torch.distributed as dist
import ridethrough as rt

atexit.register(time.sleep, 60)
threading.Thread(target=lambda: [time.sleep(0.05) for _ in iter(int, 1)], daemon=True).start()

def train(run):
    for step in run.steps(0, 14):
        dist.all_reduce(torch.ones(1))
        if run.rank == 1 and (run.generation, step) in ((1, 5), (2, 8)):
            while True:
                time.sleep(1)

rt.run(train)
atexit.unregister(time.sleep)
"""


@pytest.mark.campaign
def test_b31_a_side_thread_beats_on_and_the_second_hang_is_found_too(jobs: Any, tmp_path: Path) -> None:
    job = jobs(script(tmp_path, _STUCK_AT_EXIT), ranks=2)
    assert job.code == 0, job.out
    assert job.told("class", "rank", "step") == [("hang", 1, 5), ("hang", 1, 8)]
    stacks = "".join(path.read_text() for path in job.run.glob("incidents/*/rank1.stacks.txt"))
    sleeping = _STUCK_AT_EXIT.splitlines().index("                time.sleep(1)") + 1
    assert stacks.count(f'script.py", line {sleeping} in train') == 2
