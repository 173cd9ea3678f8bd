"""Workers' output: read from pipes, written to one file per rank and generation, echoed with the rank as prefix."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from pathlib import Path

_TAIL_LINES = 60
_CHUNK = 1 << 16


class WorkerLog:
    """One worker's output. All methods run on the agent's event loop."""

    def __init__(self, folder: Path | None, rank: int, *, echo: bool) -> None:
        self._folder = folder
        self._rank = rank
        self._echo = echo
        self._fd: int | None = None
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.path: Path | None = None
        self._pumps: list[asyncio.Task[None]] = []

    def switch(self, generation: int, rank: int) -> None:
        """Later lines go to this generation's file."""
        self._rank = rank
        self._close_file()
        if self._folder is None:
            return
        self.path = self._folder / f"g{generation:04d}-rank{rank}.log"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def attach(self, out: int, err: int) -> None:
        """Starts to read both pipes; takes them over."""
        for fd, stream in ((out, sys.stdout), (err, sys.stderr)):
            self._pumps.append(asyncio.create_task(self._pump(fd, stream is sys.stderr)))

    async def drain(self, limit_s: float) -> None:
        """Waits until both pipes are at their end: what a dead process wrote last is kept."""
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=limit_s)
        for pump in self._pumps:
            pump.cancel()
        self._close_file()

    async def _pump(self, fd: int, is_error: bool) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        rest = b""
        try:
            while data := await reader.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._line(line, is_error)
            if rest:
                self._line(rest, is_error)
        finally:
            transport.close()

    def _line(self, line: bytes, is_error: bool) -> None:
        if self._fd is not None:
            os.write(self._fd, line + b"\n")
        text = line.decode(errors="replace")
        self.tail.append(text)
        if self._echo:
            stream = sys.stderr if is_error else sys.stdout
            print(f"[rank{self._rank}] {text}", file=stream, flush=True)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
