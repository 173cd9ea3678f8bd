"""What a program can see of how it was started; written as JSON to the file in argv[1]."""

# ruff: noqa: SIM115, PLW1641
import atexit
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset

NUM_THREADS = threading.active_count()
SEEN_AT_IMPORT = {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "CUDA_", "NCCL_", "MY_"))}


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid() != MAIN_PID])


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is type(self) and other.x == self.x


MAIN_PID = int(os.environ.setdefault("FACTS_PID", str(os.getpid())))


def double(x):
    return 2 * x


def loader(method):
    batches = list(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method))
    return [batch.tolist() for batch in batches]


def facts():
    main = sys.modules["__main__"]
    return {
        "name": __name__,
        "file": __file__,
        "main_is_me": main.Point is Point,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "loader": type(__loader__).__name__,
        "doc": __doc__,
        "cached": globals().get("__cached__", "absent"),
        "argv": sys.argv[2:],
        "argv0": sys.argv[0],
        "orig_path0": sys.path[0],
        "path_doubles": len(sys.path) - len(set(sys.path)),
        "flags": list(sys.flags)[:-1],
        "executable": sys.executable,
        "pickle": pickle.loads(pickle.dumps(Point(3))) == Point(3),
        "pickled_by": Point.__module__,
        "source": inspect.getsource(double),
        "spawned": multiprocessing.get_context("spawn").Pool(1).apply(double, (4,)),
        "spawn_loader": loader("spawn"),
        "fork_loader": loader("fork"),
        "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
        "blocked": [s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "env_at_import": SEEN_AT_IMPORT,
        "torch_threads": torch.get_num_threads(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "main_thread_id": threading.get_native_id() == os.getpid(),
        "num_threads": NUM_THREADS,
        "stdin": sys.stdin.read(),
        "stdin_again": open(0, closefd=False).read(),
        "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.stdin.encoding],
        "errors": [sys.stdout.errors, sys.stderr.errors],
        "umask": os.umask(0o22),
        "cwd": os.getcwd(),
        "gc": gc.isenabled(),
        "recursion": sys.getrecursionlimit(),
        "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)],
        "nice": os.nice(0),
        "drawn": [random.random(), torch.initial_seed()],
        "excepthook": sys.excepthook is sys.__excepthook__,
    }


if __name__ == "__main__":
    path = sys.argv[1].replace("RANK", os.environ.get("RANK", "0"))
    with open(path, "w") as file:
        json.dump(facts(), file, indent=1, default=str)
    atexit.register(lambda: open(path + ".exit", "a").write("first registered, last run\n"))
    atexit.register(lambda: open(path + ".exit", "a").write("last registered, first run\n"))
    threading.Timer(0.2, lambda: open(path + ".exit", "a").write("thread waited for\n")).start()
    print("never flushed by the program", end="")
    sys.exit(int(os.environ.get("MY_EXIT", "0")))
