"""Frames on a stream: a 4-byte big-endian length, then JSON. No pickle, and a size limit."""

from __future__ import annotations

import json
import struct
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


class WireError(ConnectionError):
    """The peer sent something that is no frame of ours."""


def encode(message: dict[str, Any]) -> bytes:
    """One message as bytes on the wire."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Turns received bytes into messages; keeps what is not yet whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Messages completed by `data`. Raises WireError on an oversized frame or on something that is no object."""
        self._buffer += data
        out: list[dict[str, Any]] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                message = json.loads(body)
            except ValueError as error:
                raise WireError("a frame is not JSON") from error
            if not isinstance(message, dict):
                raise WireError("a frame is not a JSON object")
            out.append(message)
        return out
