"""Free notes and tags of a run: one JSON line each in `runs/<id>/notes.jsonl`, so that the index can be built anew.

add_note(run.path, "time-out 900 -> 300", tags=["timeout"])
read_notes(run.path)
"""

from __future__ import annotations

import datetime
import getpass
import json
import os
from dataclasses import dataclass
from pathlib import Path

FILE = "notes.jsonl"


@dataclass(frozen=True)
class Note:
    """What someone wrote about a run. `created` is ISO wall time; a note may have tags and no text."""

    created: str
    author: str
    text: str
    tags: tuple[str, ...]


def add_note(run_dir: Path, text: str, tags: list[str] | None = None) -> Note:
    """Append one note (mode 0600; one write, so two processes may do it at once). Raises OSError if it can't."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    note = Note(now, _author(), text, tuple(tags or ()))
    line = json.dumps({"created": note.created, "author": note.author, "text": text, "tags": list(note.tags)}) + "\n"
    fd = os.open(run_dir / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
    return note


def read_notes(run_dir: Path) -> list[Note]:
    """All notes in the order they were written; lines that are damaged are left out."""
    try:
        text = (run_dir / FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    notes = []
    for line in text.splitlines():
        try:
            data = json.loads(line)
            tags = tuple(str(tag) for tag in data["tags"])
            notes.append(Note(str(data["created"]), str(data["author"]), str(data["text"]), tags))
        except (ValueError, KeyError, TypeError):
            continue
    return notes


def _author() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(os.getuid())
