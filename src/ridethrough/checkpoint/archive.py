"""Small values as torch stores them: a zip archive around one pickle, made without torch's writer.

`torch.save` of a dictionary of random states takes over a millisecond and holds the GIL; these values are packed at
every step. Tensors are pickled as numpy arrays, so the archive needs nothing of this package to be read again by
`torch.load` (and so by plain `torch.distributed.checkpoint`). `works()` proves that against the installed torch.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zlib
from typing import Any

import torch

from ridethrough.checkpoint.template import save_without_crc

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_DAY = 33  # 1980-01-01, the first one that zip knows


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype in _NUMPY:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


_NUMPY = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.bool,)
)


def pack(value: Any) -> bytes:
    """The archive of a value. Raises whatever pickling it raises."""
    if not works():
        file = io.BytesIO()
        save_without_crc(value, file)
        return file.getvalue()
    return _pack(value)


def _pack(value: Any) -> bytes:
    body = io.BytesIO()
    _Pickler(body, protocol=4).dump(value)
    return _zip((b"archive/data.pkl", body.getvalue()), (b"archive/byteorder", b"little"), (b"archive/version", b"3\n"))


def _zip(*records: tuple[bytes, bytes]) -> bytes:
    """A stored (uncompressed) zip archive of these records."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    at = 0
    for name, data in records:
        crc, size = zlib.crc32(data), len(data)
        head = _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, _DAY, crc, size, size, len(name), 0) + name
        directory.append(
            _CENTRAL.pack(b"PK\x01\x02", 20, 20, 0, 0, 0, _DAY, crc, size, size, len(name), 0, 0, 0, 0, 0, at) + name
        )
        parts += (head, data)
        at += len(head) + size
    table = b"".join(directory)
    end = _END.pack(b"PK\x05\x06", 0, 0, len(records), len(records), len(table), at, 0)
    return b"".join((*parts, table, end))


@functools.lru_cache(maxsize=1)
def works() -> bool:
    """Whether the installed torch reads such an archive as what was put in."""
    value = {
        "a": (1, 2.5, None, "x"),
        "t": torch.arange(5, dtype=torch.uint8),
        "b": torch.ones(3, dtype=torch.bfloat16),
    }
    try:
        back = torch.load(io.BytesIO(_pack(value)), weights_only=False)
        same = all(torch.equal(back[k], value[k]) for k in ("t", "b"))  # type: ignore[arg-type]
        return bool(same and back["a"] == value["a"] and back["b"].dtype == torch.bfloat16)
    except Exception:  # whatever a changed torch raises here means the same: let it write itself
        return False
