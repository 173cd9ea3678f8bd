"""The loader of the reference job: which samples a step sees is a pure function of seed, step and rank.

A sample is a window of seq_len tokens and the same window moved by one. The sampler is indexed by step, so a resumed
job starts at step s + 1 without drawing, reading or skipping what came before; the number of loader workers changes
nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ridethrough.train.corpus import DataError, Tokens

Batch = tuple[Tensor, Tensor]


class Windows(Dataset[Batch]):
    """Window i: inputs tokens[i * seq_len :][:seq_len] and targets one further, both int64 [seq_len]."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return num_windows(self.tokens, self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        window = torch.from_numpy(self.tokens.window(index * self.seq_len, self.seq_len + 1))
        return window[:-1], window[1:]


def num_windows(tokens: Tokens, seq_len: int) -> int:
    """How many samples the tokens hold."""
    return max(0, (len(tokens) - 1) // seq_len)


def shuffled(position: int, size: int, key: bytes) -> int:
    """Where a keyed permutation of range(size) sends `position`; no table, so it costs the same for any size.

    A four-round Feistel network on the next even power of two, walked until it falls into the range again
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            mixed = hashlib.blake2b(right.to_bytes(8, "little"), key=key, salt=bytes([turn]), digest_size=8)
            left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
        position = left << half | right
        if position < size:
            return position


class StepSampler(Sampler[list[int]]):
    """The windows of each step, endlessly, from `first_step` on (1-based).

    Step s takes positions [(s - 1) * G, s * G) of an endless sequence in which every epoch holds each window once in an
    order of its own; G = batch_size * world_size, and rank r takes the r-th run of batch_size of them. So the
    union over ranks depends on G alone, not on how it is spread.
    """

    def __init__(
        self, size: int, *, batch_size: int, rank: int, world_size: int, seed: int, first_step: int = 1
    ) -> None:
        self.size, self.batch_size, self.rank, self.world_size = size, batch_size, rank, world_size
        self.seed, self.first_step = seed, first_step

    def __iter__(self) -> Iterator[list[int]]:
        return (self.indices(step) for step in count(self.first_step))

    def indices(self, step: int) -> list[int]:
        """Window numbers of this rank at `step`, in order."""
        first = ((step - 1) * self.world_size + self.rank) * self.batch_size
        return [self._window(p) for p in range(first, first + self.batch_size)]

    def _window(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        return shuffled(offset, self.size, f"{self.seed}/{epoch}".encode())


def fixed_batches(
    tokens: Tokens, count: int, *, seq_len: int, batch_size: int, rank: int, world_size: int
) -> list[Batch]:
    """The same `count` batches at every call, for validation; (inputs, targets), int64 [batch_size, seq_len] each."""
    windows = Windows(tokens, seq_len)
    sampler = StepSampler(len(windows), batch_size=batch_size, rank=rank, world_size=world_size, seed=0)
    drawn = ([windows[i] for i in sampler.indices(step)] for step in range(1, count + 1))
    return [(torch.stack([w[0] for w in batch]), torch.stack([w[1] for w in batch])) for batch in drawn]


class StepLoader:
    """Iterator over (inputs, targets), int64 [batch_size, seq_len] each, whose only state is the next step.

    Main thread of a worker process. `close()` ends the loader's own processes; they also end with their rank.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.windows = Windows(tokens, seq_len)
        self.sampler = StepSampler(
            len(self.windows), batch_size=batch_size, rank=rank, world_size=world_size, seed=seed
        )
        self.num_workers, self.pin_memory, self.fingerprint = num_workers, pin_memory, fingerprint
        self.step = 0  # batches handed out, whatever the workers have fetched ahead
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        self.step += 1
        inputs, targets = batch
        return inputs, targets

    def _start(self) -> Iterator[Batch]:
        self.sampler.first_step = self.step + 1
        loader: DataLoader[Batch] = DataLoader(
            self.windows,
            batch_sampler=self.sampler,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # DataLoader draws a seed for its workers; from the global stream it would shift dropout after a resume.
            generator=torch.Generator().manual_seed(self.sampler.seed),
            multiprocessing_context="fork" if self.num_workers else None,
            worker_init_fn=_detach_from_rank if self.num_workers else None,
        )
        return iter(loader)

    def close(self) -> None:
        """Stop the loader's processes, if any. The next batch starts new ones."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """{"step", "seed", "global_batch", "fingerprint"}: plain values, the same on every rank."""
        sampler = self.sampler
        return {
            "step": self.step,
            "seed": sampler.seed,
            "global_batch": sampler.batch_size * sampler.world_size,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state["step"]`. DataError if the state belongs to other data or another order of it.

        Another global batch is allowed, since a job may shrink: the step stays the index, and a warning says that the
        current epoch then skips or repeats samples.
        """
        own = self.state_dict()
        if state["global_batch"] != own["global_batch"]:
            warnings.warn(
                f"global batch was {state['global_batch']}, now {own['global_batch']}: this epoch skips or repeats "
                "samples; --global-batch-size keeps it the same at any world size",
                stacklevel=2,
            )
        for field, flag in (("fingerprint", "--data"), ("seed", "--seed")):
            if state[field] != own[field]:
                raise DataError(
                    f"the checkpoint's loader has {field} {state[field]!r}, this job {own[field]!r}: "
                    f"give the {flag} it was saved with, or another --checkpoint-dir"
                )
        self.step = int(state["step"])
        self.close()


def _detach_from_rank(worker_id: int) -> None:
    """In a forked loader worker. Its rank's connections must close when the rank dies, so this copy lets go of them;
    it dies with its rank, and a signal to the whole group leaves it to the rank to stop it."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=int(fd))
        except OSError:
            continue  # not a socket
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.close()
        else:
            connection.detach()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
