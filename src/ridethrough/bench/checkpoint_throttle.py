"""A slow shared file system, made of a fast one: writers sleep until their bytes would have fitted.

The rate (bytes per second, BENCH_STORAGE_RATE) is that of the whole job. One writer for all ranks (the keeper) gets all
of it; writers in each rank get their share. Without the variable nothing is slowed. No imports but the standard
library's: it is loaded in every environment, also in the keeper.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

CHUNK_BYTES = 16 << 20  # the keeper writes so much at a time


class Bucket:
    """Lets `rate` bytes per second through. Any thread."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Sleeps until so many bytes would be written."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self.rate
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def rate() -> float:
    """Bytes per second of the whole job; 0: as fast as it goes."""
    return float(os.environ.get("BENCH_STORAGE_RATE") or 0)


_keeper: Bucket | None = None


def hook(operation: str, path: str) -> None:
    """What the keeper calls before each operation on a file."""
    global _keeper
    if operation != "write" or not path.endswith(".distcp") or not rate():
        return
    if _keeper is None:
        _keeper = Bucket(rate())
    _keeper.take(CHUNK_BYTES)


class SlowFile:
    """A file to write to, opened at its first write, so that it can be sent to another process. For torch.save."""

    def __init__(self, path: str, share: int, file: Any = None) -> None:
        self._path, self._share = path, share
        self._file = file
        self._bucket: Bucket | None = None

    def _open(self) -> Any:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115
        if self._bucket is None:
            self._bucket = Bucket(max(1.0, rate() / self._share))
        return self._file

    def write(self, data: Any) -> int:
        file = self._open()
        if rate() and self._bucket is not None:
            self._bucket.take(len(memoryview(data).cast("B")))
        return int(file.write(data))

    def flush(self) -> None:
        self._open().flush()

    def fileno(self) -> int:
        return int(self._open().fileno())

    def tell(self) -> int:
        return int(self._open().tell())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
