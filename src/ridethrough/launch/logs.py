"""Workers' output: read from pipes, written to one file per rank and generation, echoed with the rank as prefix."""

from __future__ import annotations

import asyncio
import contextlib
import os
import string
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.console import Console

_TAIL_LINES = 60
_CHUNK = 1 << 16
_BAR_S = 5.0  # between two states of a progress bar that are kept
_MOST_CHUNKS = 64  # of a dead process's last words: a pipe holds one or a few, but its children may go on writing


@dataclass
class _Pipe:
    """`rest`: the beginning of a line whose end has not come yet. `told_s`: when a part of one was kept."""

    is_error: bool
    rest: bytes = b""
    told_s: float = -_BAR_S


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
        self._pipes: dict[int, _Pipe] = {}
        self._ended = asyncio.Event()
        self._is_lossy = False

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
        with self._said_once():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = _append(self._folder / name)
            self.path = self._folder / name

    def attach(self, out: int, err: int) -> None:
        """Starts to read both pipes; takes them over."""
        for fd, is_error in ((out, False), (err, True)):
            os.set_blocking(fd, False)
            self._pipes[fd] = _Pipe(is_error)
            asyncio.get_running_loop().add_reader(fd, self._read, fd)

    def catch_up(self) -> None:
        """Reads what is in the pipes by now."""
        for fd in list(self._pipes):
            for _ in range(_MOST_CHUNKS):
                if not self._read(fd):
                    break

    async def drain(self, limit_s: float) -> None:
        """Waits until both pipes are at their end: what a dead process wrote last is kept."""
        if self._pipes:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), limit_s)
        for fd in list(self._pipes):
            self._close_pipe(fd)
        self._close_file()

    def _read(self, fd: int) -> bool:
        """False if there is nothing to be read at present, or no more at all."""
        pipe = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(fd)
            return False
        *lines, rest = (pipe.rest + data).split(b"\n")
        pipe.rest = _last_state(rest)
        if b"\r" in rest and time.monotonic() - pipe.told_s >= _BAR_S:
            pipe.told_s = time.monotonic()
            lines.append(rest)
        elif len(rest) >= _CHUNK:
            lines.append(rest)
            pipe.rest = b""
        for line in lines:
            self._line(line, pipe.is_error)
        return True

    def _close_pipe(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        pipe = self._pipes.pop(fd)
        if pipe.rest:
            self._line(pipe.rest, pipe.is_error)
        if not self._pipes:
            self._ended.set()

    def _line(self, line: bytes, is_error: bool) -> None:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]  # as a terminal would show it
        if self._fd is not None:
            with self._said_once():
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
            with self._said_once(), open(_append(self._folder / name), "wb", buffering=0) as file:
                file.write(f"{self._prefix()}{text}\n".encode())

    @contextlib.contextmanager
    def _said_once(self) -> Iterator[None]:
        """A disk that takes no more costs lines of the files, and nothing else."""
        try:
            yield
        except OSError as error:
            if not self._is_lossy:
                self._is_lossy = True
                missing = f"output of rank {self._rank} is missing in {self._folder}"
                print(f"ridethrough: {missing}: {error.strerror}", file=sys.stderr, flush=True)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _last_state(rest: bytes) -> bytes:
    """What is needed of a line that is written over and over: its newest state, and a return that may be its end."""
    last = rest.rstrip(b"\r").rfind(b"\r")
    return rest[max(0, last) :]
