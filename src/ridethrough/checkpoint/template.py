"""DCP stores each tensor as a small `torch.save` archive: constant bytes, the raw data, constant bytes.

Knowing the constant parts, a snapshot in shared memory can *be* the file: the copy writes raw data into
place, and the keeper writes the memory as it is, without torch. With CRCs switched off the constant parts
depend on dtype and shape alone. They are obtained by saving an untouched tensor of that shape into a sink
which keeps everything but the data, so that a shape of any size costs a millisecond and no memory. `works()`
proves the form against the installed torch.
"""

from __future__ import annotations

import functools
import io
import threading
from dataclasses import dataclass
from typing import Any

import torch

ALIGN = 64  # torch aligns data inside an archive to this; archives start on it too
_PROBE_BYTES = 1 << 16
_crc_lock = threading.Lock()


@dataclass(frozen=True)
class Template:
    """Archive of one tensor: `prefix`, `data_bytes` of raw data, `suffix`."""

    prefix: bytes
    suffix: bytes
    data_bytes: int

    @property
    def total_bytes(self) -> int:
        return len(self.prefix) + self.data_bytes + len(self.suffix)


class _Sink:
    """A file that remembers small writes, and of large ones only how long they were."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, bytes | None]] = []
        self.position = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        keep = bytes(data) if size <= _PROBE_BYTES else None
        self.pieces.append((self.position, size, keep))
        self.position += size
        return size

    def flush(self) -> None:
        pass


def save_without_crc(value: Any, file: Any) -> None:
    """torch.save with CRCs off (they would make the constant bytes depend on the data), then as it was."""
    serialization: Any = torch.serialization
    with _crc_lock:
        before = serialization.get_crc32_options()
        serialization.set_crc32_options(False)
        try:
            torch.save(value, file)
        finally:
            serialization.set_crc32_options(before)


@functools.lru_cache(maxsize=65536)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """The template of a contiguous CPU tensor. Raises ValueError when the archive is not of the known form."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    mark = None
    if 0 < size <= _PROBE_BYTES:
        raw = tensor.reshape(-1).view(torch.uint8)
        raw.copy_((torch.arange(size, dtype=torch.int64) * 37 + 11 & 0xFF).to(torch.uint8))
        mark = bytes(raw.tolist())
    sink = _Sink()
    save_without_crc(tensor, sink)
    at = [
        position
        for position, length, data in sink.pieces
        if length == size and position % ALIGN == 0 and (data is None if mark is None else data == mark)
    ]
    if size == 0 or len(at) != 1:
        raise ValueError(f"no single data record in the archive of {dtype} {shape}")
    prefix = b"".join(data or b"" for position, _n, data in sink.pieces if position < at[0])
    suffix = b"".join(data or b"" for position, _n, data in sink.pieces if position > at[0])
    made = Template(prefix, suffix, size)
    if len(prefix) != at[0] or made.total_bytes != sink.position:
        raise ValueError(f"unexpected large record in the archive of {dtype} {shape}")
    return made


@functools.lru_cache(maxsize=1)
def works() -> bool:
    """Whether archives put together from templates read back, here, as the tensors that they hold."""
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for shape in ((), (7,), (3, 5), (300, 100)):
                tensor = (torch.arange(max(1, _numel(shape))) * 3 % 251).to(dtype).reshape(shape)
                form = template(dtype, shape)
                raw = bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist())
                back = torch.load(io.BytesIO(form.prefix + raw + form.suffix), weights_only=True)
                if back.dtype != dtype or not torch.equal(back, tensor):
                    return False
    except (ValueError, RuntimeError, AttributeError, OSError):
        return False
    return True


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for dim in shape:
        n *= dim
    return n
