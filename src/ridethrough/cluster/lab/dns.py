"""A DNS server for the lab: A records that come, go and come late, over UDP, as pods' names do in a cluster."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

_A, _IN = 1, 1
_NAME_ERROR = 3
_TTL_S = 5


class DnsServer:
    """Answers from a thread of its own until it is closed. Names have no dot at their end; case does not matter."""

    def __init__(self, server: socket.socket) -> None:
        self._socket = server
        self._records: dict[str, str] = {}
        self._hidden: dict[str, float] = {}
        self._lock = threading.Lock()
        self.asked: list[str] = []
        threading.Thread(target=self._serve, name="lab-dns", daemon=True).start()

    def set(self, name: str, address: str) -> None:
        with self._lock:
            self._records[name.lower()] = address

    def remove(self, name: str, address: str) -> None:
        """Forget a name if it still has this address: its pod's successor may have taken it over."""
        with self._lock:
            if self._records.get(name.lower()) == address:
                del self._records[name.lower()]

    def hide(self, name: str, seconds: float) -> None:
        """Answer "no such name" for a while, as if the cluster's DNS had not heard of the pod yet."""
        with self._lock:
            self._hidden[name.lower()] = time.monotonic() + seconds

    def close(self) -> None:
        # Closing alone does not wake the thread that waits.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, peer = self._socket.recvfrom(4096)
            except OSError:
                return
            if not query:
                return
            answer = self.answer(query)
            if answer is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendto(answer, peer)

    def answer(self, query: bytes) -> bytes | None:
        """The packet that answers a packet; None for what is no question."""
        try:
            ident, flags, questions = struct.unpack("!HHH", query[:6])
            name, end = _read_name(query, 12)
            kind, family = struct.unpack("!HH", query[end : end + 4])
        except (struct.error, IndexError, UnicodeDecodeError):
            return None
        if flags & 0x8000 or questions != 1:
            return None
        with self._lock:
            self.asked.append(name)
            address = self._records.get(name)
            if self._hidden.get(name, 0.0) > time.monotonic():
                address = None
        question = query[12 : end + 4]
        if address is None:
            return struct.pack("!HHHHHH", ident, 0x8580 | _NAME_ERROR, 1, 0, 0, 0) + question
        if kind != _A or family != _IN:  # the name is there, without such a record (AAAA)
            return struct.pack("!HHHHHH", ident, 0x8580, 1, 0, 0, 0) + question
        record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
        return struct.pack("!HHHHHH", ident, 0x8580, 1, 1, 0, 0) + question + record


def _read_name(packet: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    return ".".join(labels), at + 1
