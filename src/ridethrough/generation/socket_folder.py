"""Where the Unix sockets of one launch are: a private folder whose path is short enough for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

_LONGEST = 62  # of the parent: a Unix socket's path has 107 bytes at most, on every Linux


def temporary_roots() -> list[Path]:
    """Every folder in which `socket_folder` may make one."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]))


def socket_root() -> Path:
    """The temporary folder (TMPDIR), or /tmp where that one's path is too long."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(str(chosen).encode()) <= _LONGEST else Path("/tmp")


def socket_folder(prefix: str) -> Path:
    """Makes a folder of mode 0700 that nobody else can guess; its maker removes it. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=socket_root()))
