"""Runs, incidents, steps or events as one CSV, JSON or JSON-lines file for other tools."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ridethrough.ledger.reading import LedgerError, read_events
from ridethrough.ledger.rundir import RunDirError
from ridethrough.report.documents import fingerprint, read_record
from ridethrough.report.index import Index

WHAT = ("runs", "incidents", "steps", "events")
_LARGE = ("incidents", "documents", "fingerprint", "view")


class ExportError(ValueError):
    """It can't be exported that way; the message is one line with the remedy."""


def export_rows(what: str, to: Path, *, index: Index | None = None, paths: Sequence[Path] = ()) -> int:
    """Write `what` of the index, or of the run folders `paths`, to the file; returns the number of rows.

    Raises ExportError: an unknown kind or suffix, a run that can't be read, a file that can't be written.
    """
    if what not in WHAT:
        raise ExportError(f"--what {what}: choose one of {', '.join(WHAT)}")
    if to.suffix not in (".csv", ".json", ".jsonl"):
        raise ExportError(f"--to {to}: the name must end in .csv, .json or .jsonl")
    if what == "events" and to.suffix != ".jsonl":
        raise ExportError(f"--to {to}: events have different fields each; give a .jsonl file")
    try:
        with to.open("w", encoding="utf-8", newline="") as stream:
            return _write(_rows(what, index, paths), to.suffix, stream)
    except (LedgerError, RunDirError) as error:
        raise ExportError(str(error)) from error
    except OSError as error:
        raise ExportError(f"{error.filename or to}: {error.strerror}; give a file that can be written") from error


def _rows(what: str, index: Index | None, paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    if index is not None:
        yield from index.runs() if what == "runs" else index.incidents()
        return
    for path in paths:
        if what in ("runs", "incidents"):
            record = read_record(path, fingerprint(path))
            if record.problem:
                raise ExportError(f"{path}: {record.problem}")
            if what == "runs":
                fields = {k: v for k, v in vars(record).items() if k not in _LARGE}
                yield fields
            for number, row in enumerate(record.incidents if what == "incidents" else (), 1):
                yield {"run_id": path.name, "number": number, **row}
        else:
            for event in read_events(path):
                if what == "events" or event["kind"] == "step":
                    yield {"run_id": path.name, **event}


def _write(rows: Iterable[dict[str, Any]], suffix: str, stream: TextIO) -> int:
    if suffix == ".jsonl":
        return sum(stream.write(json.dumps(row, default=str) + "\n") > 0 for row in rows)
    found = list(rows)
    if suffix == ".json":
        json.dump(found, stream, indent=1, default=str)
        stream.write("\n")
        return len(found)
    names = list(dict.fromkeys(name for row in found for name in row))
    writer = csv.writer(stream)
    writer.writerow(names)
    for row in found:
        writer.writerow([_cell(row.get(name)) for name in names])
    return len(found)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else "" if value is None else value
