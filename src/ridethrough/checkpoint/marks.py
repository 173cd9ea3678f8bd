"""Begin, end and fence marks of a snapshot, in the last page of its arena: what tells a reader of the arena, in any
process, whether the copy in it is whole.

    begin   written before the first byte is copied
    end     written when everything is in place
    fence   written when the optimizers asked for leave to write, so that nothing was written before

Each mark is the serial number of the snapshot, which the arena's owner counts up. A mark outlives its writer: after
a SIGKILL the keeper still reads what was reached. Knows nothing of torch.
"""

from __future__ import annotations

import mmap
import struct

MARK_BYTES = 4096
_U64 = struct.Struct("<Q")
_BEGIN, _END, _FENCE = 0, 8, 16


def _put(memory: mmap.mmap, at: int, value: int) -> None:
    _U64.pack_into(memory, len(memory) - MARK_BYTES + at, value)


def _get(memory: mmap.mmap, at: int) -> int:
    return int(_U64.unpack_from(memory, len(memory) - MARK_BYTES + at)[0])


def begin(memory: mmap.mmap, serial: int) -> None:
    _put(memory, _END, 0)
    _put(memory, _FENCE, 0)
    _put(memory, _BEGIN, serial)


def end(memory: mmap.mmap, serial: int) -> None:
    _put(memory, _END, serial)


def fence(memory: mmap.mmap, serial: int) -> None:
    _put(memory, _FENCE, serial)


def void(memory: mmap.mmap) -> None:
    """What is in the arena is of no step at all."""
    _put(memory, _BEGIN, 0)


def whole(memory: mmap.mmap, serial: int) -> bool:
    """The copy `serial` was finished, and nothing was begun over it."""
    return _get(memory, _BEGIN) == serial and _get(memory, _END) == serial


def fenced(memory: mmap.mmap, serial: int) -> bool:
    """It is whole, and its optimizers have waited for it."""
    return whole(memory, serial) and _get(memory, _FENCE) == serial
