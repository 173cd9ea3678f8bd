"""Progress on standard error: one line that changes on a terminal, a line each elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def live_line() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows how far a command is; the terminal is clean again at the end."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""

    def show(line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{clear}{line[:width]}" if clear else f"{line}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(clear)
