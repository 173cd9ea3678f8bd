"""The index over all runs below a root: SQLite with full text, made from the run folders and from nothing else.

    with Index(root) as index:
        index.refresh()
        index.runs(); index.search("nccl timeout 900")

The file `<root>/.index.sqlite` may be deleted at any time; `refresh` reads what changed since, and all if it is gone,
damaged or of another version. Two processes may refresh at once: each run is written in one transaction, and the
later writer finds the same. Where the root can't be written the index lives in memory.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ridethrough.ledger.reading import LedgerError
from ridethrough.ledger.rundir import RunDirError
from ridethrough.report.documents import INCIDENT, Document, RunRecord, fingerprint, read_record
from ridethrough.report.view import unpacked

FILE = ".index.sqlite"
VERSION = 3
_BUSY_S = 20.0

_TABLES = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, created TEXT, host TEXT, command TEXT,
  config TEXT, config_hash TEXT, schedule_hash TEXT, versions TEXT, code INTEGER, reason TEXT, ended TEXT,
  steps INTEGER, slots INTEGER, wall_ns INTEGER, training_goodput REAL, infrastructure_goodput REAL, final_loss REAL,
  val_loss REAL, final_hash TEXT, num_incidents INTEGER, num_recovered INTEGER, steps_lost INTEGER, states_ns TEXT,
  classes TEXT, tags TEXT, problem TEXT, view BLOB);
CREATE TABLE incidents (run_id TEXT NOT NULL, number INTEGER NOT NULL, id TEXT, class TEXT, rank INTEGER, host TEXT,
  phase TEXT, step INTEGER, generation INTEGER, rung TEXT, detected_by TEXT, attempts INTEGER, detected_s REAL,
  first_step_s REAL, caught_up_s REAL, resumed_at INTEGER, steps_lost INTEGER, root_cause TEXT, injected TEXT,
  stages_s TEXT,
  PRIMARY KEY (run_id, number));
CREATE INDEX incidents_class ON incidents (class);
CREATE VIRTUAL TABLE texts USING fts5 (run_id UNINDEXED, source UNINDEXED, body, tokenize = "unicode61");
"""
_STORED = tuple(RunRecord.__annotations__)[:-2]  # all but incidents and documents
_RUN_COLUMNS = _STORED[:-1]  # nor the view, which is large
_JSON_COLUMNS = ("config", "versions", "states_ns", "classes", "tags")
_JSON_OF_INCIDENT = ("injected", "stages_s")


@dataclass(frozen=True)
class Hit:
    """A run in which every word of a query occurs; `places` are (source, excerpt), the best ones first."""

    run_id: str
    places: tuple[tuple[str, str], ...]


class Index:
    """An open index. One thread's object; any number of processes may have one each on the same root."""

    def __init__(self, root: Path) -> None:
        """Opens or makes the index of `root`. Raises RunDirError if the root is no folder, or without FTS5."""
        if not root.is_dir():
            raise RunDirError(f"{root} is no folder of runs: name one with --runs DIR, or start a run first")
        self.root = root
        self._file = root / FILE
        self._db = self._open()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def refresh(self, *, rebuild: bool = False) -> int:
        """Read the runs that changed since the last time (all, if `rebuild`); returns how many were read.

        A run that can't be read is in the index too, with its `problem` and without figures.
        """
        known = {} if rebuild else dict(self._db.execute("SELECT run_id, fingerprint FROM runs"))
        present: dict[str, Path] = {path.name: path for path in run_folders(self.root)}
        num_read = 0
        for run_id, path in present.items():
            mark = fingerprint(path)
            if known.get(run_id) != mark:
                self._put(read_record(path, mark))
                num_read += 1
        gone = [run_id for (run_id,) in self._db.execute("SELECT run_id FROM runs") if run_id not in present]
        if gone:
            with self._writing():
                for run_id in gone:
                    self._forget(run_id)
        return num_read

    def runs(self, *, tag: str | None = None) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        rows = self._db.execute(f"SELECT {', '.join(_RUN_COLUMNS)} FROM runs ORDER BY created DESC, run_id DESC")
        found = [_run(row) for row in rows]
        return [run for run in found if tag is None or tag in run["tags"]]

    def names(self) -> set[str]:
        """Of all runs that are below the root now, read or not."""
        return {path.name for path in run_folders(self.root)}

    def run(self, run_id: str) -> dict[str, Any] | None:
        rows = self._db.execute(f"SELECT {', '.join(_RUN_COLUMNS)} FROM runs WHERE run_id = ?", (run_id,))
        return next((_run(row) for row in rows), None)

    def view(self, run_id: str) -> dict[str, Any] | None:
        """What the dashboard shows of a run, as it was when the run was last read; None if it couldn't be."""
        rows = self._db.execute("SELECT view FROM runs WHERE run_id = ?", (run_id,)).fetchall()
        return unpacked(rows[0][0]) if rows and rows[0][0] is not None else None

    def refresh_run(self, run_id: str, *, always: bool = False) -> None:
        """Read one run if it changed (or `always`: time goes on for one that lives).

        Raises RunDirError if there is none of that name directly below the root.
        """
        path = self.root / run_id
        if path.name != run_id or run_id[:1] in ("", ".") or not _is_run(path):
            raise RunDirError(f"no run {run_id!r} in {self.root}")
        mark = fingerprint(path)
        rows = self._db.execute("SELECT fingerprint FROM runs WHERE run_id = ?", (run_id,)).fetchall()
        if always or not rows or rows[0][0] != mark:
            self._put(read_record(path, mark))

    def num_incidents(self, run_id: str) -> int:
        return int(self._db.execute("SELECT count(*) FROM incidents WHERE run_id = ?", (run_id,)).fetchone()[0])

    def incidents(self, run_id: str | None = None, *, limit: int = -1, offset: int = 0) -> list[dict[str, Any]]:
        """Incidents of one run or of all, in the order of runs and of faults."""
        where, given = ("WHERE run_id = ?", [run_id]) if run_id is not None else ("", [])
        cursor = self._db.execute(
            f"SELECT * FROM incidents {where} ORDER BY run_id, number LIMIT ? OFFSET ?", [*given, limit, offset]
        )
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        return [{**row, **{name: json.loads(row[name]) for name in _JSON_OF_INCIDENT}} for row in rows]

    def search(self, query: str, *, limit: int = 50) -> list[Hit]:
        """Runs in which every word occurs (as a word or its beginning) somewhere: config, command, tracebacks,
        stacks, benchmark results, notes, tags. Best first. Words are letters and digits; the rest divides them."""
        words = _words(query)
        if not words:
            return []
        ranks: dict[str, float] = {}
        places: dict[str, dict[str, tuple[float, str]]] = {}
        for place, word in enumerate(words):
            found: dict[str, float] = {}
            rows = self._db.execute(
                "SELECT run_id, source, bm25(texts), snippet(texts, 2, '', '', ' ... ', 16) FROM texts "
                "WHERE texts MATCH ?",
                (f'"{word}"*',),
            )
            for run_id, source, rank, excerpt in rows:
                found[run_id] = min(found.get(run_id, 0.0), rank)
                best = places.setdefault(run_id, {})
                best[source] = (best.get(source, (0.0, ""))[0] + rank, best.get(source, (0.0, excerpt))[1])
            ranks = found if not place else {r: ranks[r] + found[r] for r in ranks.keys() & found.keys()}
        order = sorted(ranks, key=lambda run_id: (ranks[run_id], run_id))[:limit]
        return [Hit(run_id, _best_places(places[run_id])) for run_id in order]

    def _open(self) -> sqlite3.Connection:
        try:
            return self._prepared(str(self._file))
        except sqlite3.OperationalError as error:
            if "fts5" in str(error):
                raise RunDirError(
                    "this Python's SQLite lacks FTS5: use one built with it (python.org, Debian)"
                ) from None
            return self._prepared(":memory:")  # not ours to write
        except sqlite3.DatabaseError:  # damaged, or no database at all: it holds nothing that the folders do not
            with contextlib.suppress(OSError):
                self._file.unlink()
                return self._prepared(str(self._file))
            return self._prepared(":memory:")

    def _prepared(self, name: str) -> sqlite3.Connection:
        db = sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None)
        try:
            if name != ":memory:":
                Path(name).chmod(0o600)
            db.execute("PRAGMA synchronous = OFF")  # after a power cut it is made anew
            db.execute("BEGIN IMMEDIATE")
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                for (table,) in db.execute(
                    "SELECT name FROM sqlite_master WHERE name IN ('runs', 'incidents', 'texts')"
                ).fetchall():
                    db.execute(f"DROP TABLE {table}")
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            db.close()
            raise error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error)) from error
        return db

    def _put(self, record: RunRecord) -> None:
        values = [getattr(record, name) for name in _STORED]
        values = [json.dumps(v, default=str) if n in _JSON_COLUMNS else v for n, v in zip(_STORED, values, strict=True)]
        marks = ", ".join("?" * len(_STORED))
        with self._writing():
            self._forget(record.run_id)
            self._db.execute(f"INSERT INTO runs ({', '.join(_STORED)}) VALUES ({marks})", values)
            self._db.executemany(
                f"INSERT INTO incidents VALUES ({', '.join('?' * (2 + len(INCIDENT)))})",
                [(record.run_id, number, *_cells(row)) for number, row in enumerate(record.incidents, 1)],
            )
            self._db.executemany("INSERT INTO texts VALUES (?, ?, ?)", [_text(record, d) for d in record.documents])

    def _forget(self, run_id: str) -> None:
        for table in ("runs", "incidents", "texts"):
            self._db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def run_folders(root: Path) -> Iterator[Path]:
    """Folders below `root` that hold a run, by name."""
    for path in sorted(root.iterdir()):
        if path.name[0] != "." and _is_run(path):
            yield path


def _is_run(path: Path) -> bool:
    """Another user's folder may be one: reading it will say that it can't be read."""
    try:
        return (path / "run.json").exists()
    except PermissionError:
        return True


def find_run(root: Path, name: str) -> Path:
    """The run that someone means: a folder, an id, the unique beginning of one, or `latest`.

    Raises RunDirError (one line with the remedy) when there is none or more than one.
    """
    as_path = Path(name)
    if _is_run(as_path):
        return as_path.absolute()
    if not root.is_dir():
        raise RunDirError(f"{root} is no folder of runs: name one with --runs DIR, or start a run first")
    present = list(run_folders(root))
    if name == "latest" and present:
        return max(present, key=_changed_ns)
    matching = [p for p in present if p.name == name] or [p for p in present if name and p.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        some = ", ".join(path.name for path in matching[:5])
        raise RunDirError(f"{name!r} is the beginning of {len(matching)} runs in {root} ({some}): give more of it")
    raise RunDirError(f"no run {name!r} in {root}: `ridethrough runs ls` lists them; --runs DIR names another root")


def _changed_ns(path: Path) -> int:
    try:
        return (path / "run.json").stat().st_mtime_ns
    except OSError:
        return 0  # another user's


def _words(query: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in query).split()


def _best_places(places: dict[str, tuple[float, str]], most: int = 3) -> tuple[tuple[str, str], ...]:
    order = sorted(places.items(), key=lambda item: item[1][0])[:most]
    return tuple((source, " ".join(excerpt.split())) for source, (_, excerpt) in order)


def _cells(incident: dict[str, Any]) -> list[Any]:
    return [json.dumps(incident[name]) if name in _JSON_OF_INCIDENT else incident[name] for name in INCIDENT]


def _text(record: RunRecord, document: Document) -> tuple[str, str, str]:
    return record.run_id, document.source, document.body


def _run(row: tuple[Any, ...]) -> dict[str, Any]:
    run = dict(zip(_RUN_COLUMNS, row, strict=True))
    return {**run, **{name: json.loads(run[name]) for name in _JSON_COLUMNS}}


__all__ = ["Hit", "Index", "LedgerError", "find_run", "run_folders"]
