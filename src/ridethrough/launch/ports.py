"""Who holds a port of this machine, for an error that helps. From /proc, as far as this user may look."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LISTEN = "0A"


def holder(port: int) -> str:
    """`process 4711 (python3 serve.py)`, or "a process that can't be seen from here"."""
    inodes = _inodes(port)
    for name in os.listdir("/proc") if inodes else []:
        if name.isdigit() and _sockets(name) & inodes:
            return f"process {name} ({_command(name)})"
    return "a process that can't be seen from here"


def _inodes(port: int) -> set[str]:
    """Sockets bound to the port; those that listen, if any does."""
    listening: set[str] = set()
    others: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                (listening if fields[3] == _LISTEN else others).add(fields[9])
    return listening or others


def _sockets(pid: str) -> set[str]:
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            if match:
                found.add(match[1])
    except OSError:
        return found
    return found


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    text = b" ".join(words).decode(errors="replace")
    return text if len(text) <= 80 else text[:77] + "..."
