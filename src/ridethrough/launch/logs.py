"""Workers' output: read from pipes, written to one file per rank and generation, echoed with the rank as prefix."""

from __future__ import annotations

import asyncio
import os
import string
import sys
from collections import deque
from pathlib import Path

from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console

_TAIL_LINES = 60
_CHUNK = 1 << 16


class WorkerLog:
    """One worker's output. All methods run on the agent's event loop.

    Files: `a<restarts>-rank<r>.log` until the worker enters its first generation (a script without `rt.run` never
    does), then `g<generation>-rank<r>.log`. None is ever written over.
    """

    def __init__(self, config: LaunchConfig, folder: Path | None, rank: int, local_rank: int, console: Console) -> None:
        self._config = config
        self._console = console
        self._folder = folder
        self._rank = rank
        self._local_rank = local_rank
        self._fd: int | None = None
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.path: Path | None = None
        self._pumps: list[asyncio.Task[None]] = []

    def begin(self, restarts: int) -> None:
        """Lines go to the file of this start."""
        self._console.begin(self._prefix())
        self._open(f"a{restarts:04d}-rank{self._rank}.log")

    def switch(self, generation: int, rank: int) -> None:
        """Later lines go to this generation's file."""
        self._rank = rank
        self._console.begin(self._prefix())
        self._open(f"g{generation:04d}-rank{rank}.log")

    def _open(self, name: str) -> None:
        self._close_file()
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = self._folder / name
        self._fd = _append(self.path)

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
        name = "err" if is_error else "out"
        if any(word in text for word in self._config.filters.get(name, ())):
            self._duplicate(f"filtered-std{name}.log", text)
        if self._is_shown(name):
            self._console.show(self._prefix(), text, is_error=is_error)

    def _is_shown(self, stream: str) -> bool:
        config = self._config
        if not config.echo or stream in config.hidden.get(self._local_rank, ()):
            return False
        return config.shown_ranks is None or self._local_rank in config.shown_ranks

    def _prefix(self) -> str:
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        if not template:
            return f"[rank{self._rank}] "
        names = {"role_name": self._config.role, "rank": self._rank, "local_rank": self._local_rank}
        return string.Template(template).safe_substitute(names)

    def _duplicate(self, name: str, text: str) -> None:
        if self._folder is not None:
            fd = _append(self._folder / name)
            os.write(fd, f"{self._prefix()}{text}\n".encode())
            os.close(fd)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
