"""What the index keeps of one run: its figures, its incidents, and the texts that a search goes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ridethrough.ledger.incidents import Incident, place
from ridethrough.ledger.reading import LedgerError
from ridethrough.ledger.rundir import RunDir, RunDirError, flat_config
from ridethrough.ledger.summary import RunLedger, ledger_summary, read_run
from ridethrough.report.live import life
from ridethrough.report.notes import FILE as NOTES
from ridethrough.report.notes import read_notes
from ridethrough.report.view import packed, view_of

_LONGEST_TEXT = 200_000  # characters of one document
_INCIDENTS_PER_TEXT = 50
INCIDENT = ("id", "class", "rank", "host", "phase", "step", "generation", "rung", "detected_by", "attempts") + (
    *("detected_s", "first_step_s", "caught_up_s", "resumed_at", "steps_lost", "root_cause", "injected", "stages_s"),
)
"""The fields of an incident's JSON that the index keeps."""
_TEXT_SUFFIXES = (".txt", ".log", ".json", ".stack", ".stacks")


@dataclass(frozen=True)
class Document:
    """A text of a run and where it comes from, for example `config` or `incident 0.1`."""

    source: str
    body: str


@dataclass
class RunRecord:
    """One row of the index. Figures are None for a run that can't be read; `problem` says why."""

    run_id: str
    fingerprint: str
    created: str | None = None
    host: str | None = None
    command: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str | None = None
    schedule_hash: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    reason: str | None = None
    ended: str | None = None
    steps: int | None = None
    slots: int | None = None
    wall_ns: int | None = None
    training_goodput: float | None = None
    infrastructure_goodput: float | None = None
    final_loss: float | None = None
    val_loss: float | None = None
    final_hash: str | None = None
    num_incidents: int | None = None
    num_recovered: int | None = None
    steps_lost: int | None = None
    states_ns: dict[str, int] = field(default_factory=dict)
    classes: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    problem: str | None = None
    view: bytes | None = None
    incidents: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)


def fingerprint(path: Path) -> str:
    """Changes whenever a file that the record is made of does (sizes and times; nothing is read)."""
    marks: list[tuple[str, int, int]] = []
    for part in (path / "run.json", path / NOTES, *_files(path / "events"), *_files(path / "incidents"), *_bench(path)):
        try:
            stat = part.stat()
        except OSError:
            continue
        marks.append((part.name, stat.st_size, stat.st_mtime_ns))
    return xxh3_64_hexdigest(repr(marks).encode())


def read_record(path: Path, mark: str) -> RunRecord:
    """Read one run. Never raises for a damaged run: that is its `problem`."""
    record = RunRecord(path.name, mark)
    try:
        run = RunDir.open(path).run_json()
        _describe(record, run)
        record.documents = _texts(path, run)
        record.tags = sorted({tag for note in read_notes(path) for tag in note.tags})
        alive = life(path)
        ledger = read_run(path, alive.end_ns)
    except (RunDirError, LedgerError, OSError, KeyError, TypeError, ValueError) as error:
        record.problem = str(error) or type(error).__name__
        return record
    if policy := ledger.run["config"].get("policy"):
        record.config = ledger.run["config"]
        record.documents.append(Document("policy", _lines(flat_config({"policy": policy}))))
    record.view = packed(view_of(ledger, running=alive.running))
    return record_of(ledger, record)


def record_of(ledger: RunLedger, record: RunRecord) -> RunRecord:
    """Fill in what the ledger says."""
    data = ledger_summary(ledger)
    for name in ("steps", "training_goodput", "infrastructure_goodput", "final_loss", "val_loss", "final_hash"):
        setattr(record, name, data[name])
    record.slots, record.wall_ns = ledger.part.slots, ledger.part.wall_ns
    record.states_ns, record.classes = data["ledger"]["states_ns"], data["classes"]
    found = ledger.incidents
    record.num_incidents, record.num_recovered = len(found), sum(i.recovered for i in found)
    record.steps_lost = sum(i.steps_lost or 0 for i in found)
    record.incidents = [{name: incident[name] for name in INCIDENT} for incident in data["incidents"]]
    for first in range(0, len(found), _INCIDENTS_PER_TEXT):
        some = found[first : first + _INCIDENTS_PER_TEXT]
        name = f"incident {some[0].id}" if len(some) == 1 else f"incidents {some[0].id} to {some[-1].id}"
        record.documents.append(Document(name, "\n".join(_incident_text(i) for i in some)[:_LONGEST_TEXT]))
    return record


def _describe(record: RunRecord, run: dict[str, Any]) -> None:
    record.created, record.host = run["created"], run["host"]
    record.command, record.config = " ".join(run["command"]), run["config"]
    record.config_hash, record.schedule_hash = run["config_hash"], run["schedule_hash"]
    record.versions = run["versions"]
    if run["result"] is not None:
        record.code, record.reason, record.ended = (run["result"][name] for name in ("code", "reason", "ended"))


def _incident_text(i: Incident) -> str:
    effects = "\n".join({str(s.get("cause")) for s in i.secondary})
    where = f"{i.class_} of rank {i.rank} on {i.host} in {place(i.phase, i.step)}, rung {i.rung}, {i.detected_by}"
    where += f", injected {' '.join(i.injected)}" if i.injected else ""
    return f"{i.id}: {where}\n{i.root_cause or ''}\n{effects}"


def _texts(path: Path, run: dict[str, Any]) -> list[Document]:
    versions = " ".join(f"{name} {version}" for name, version in run["versions"].items())
    about = f"{run['run_id']} {run['created']} {run['host']} {run['config_hash']} {run['schedule_hash']}\n{versions}"
    result = run["result"] or {}
    found = [
        Document("config", _lines(flat_config(run["config"]))),
        Document("command", " ".join(run["command"])),
        Document("run", f"{about}\n{result.get('reason', '')}"),
    ]
    for note in read_notes(path):
        found.append(Document(f"note of {note.created}", " ".join([note.text, *note.tags])))
    for file in [*_files(path / "incidents"), *_bench(path)]:
        if file.suffix in _TEXT_SUFFIXES:
            with file.open("rb") as stream:
                text = stream.read(_LONGEST_TEXT).decode(errors="replace")
            found.append(Document(str(file.relative_to(path)), text))
    return found


def _lines(settings: dict[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in settings.items())


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    except PermissionError:
        return []


def _bench(path: Path) -> list[Path]:
    try:
        return sorted(path.glob("bench*.json"))
    except PermissionError:
        return []
