"""The folder of one run: `runs/<id>/`, private to its user; `run.json` says what it is and how it ended.

    run = create_run(Path("runs"), run_id=None, config={"steps": 200}, command=sys.argv, schedule_hash=None)
    run.path, run.events_dir, run.run_json()["config_hash"]
    run.finish(0, "done")

A run id names one config for ever: opening it again with another config or another fault schedule is an error
that names what differs, and nothing in the folder is touched.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from ridethrough.version import __version__

SCHEMA = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEYS = frozenset(
    ["run_id", "created", "command", "config", "config_hash", "schedule_hash", "versions", "host", "result"]
)
_FOLDERS = ("events", "logs", "incidents", "fired")


class RunDirError(ValueError):
    """A run folder cannot be created or opened; the message is one line that says what to do."""


def config_hash(config: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the config as canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_run_id(run_id: str) -> None:
    """Raises RunDirError unless the id can name a folder."""
    if not _ID.fullmatch(run_id):
        raise RunDirError(f"run id {run_id!r} is not usable as a folder: use letters, digits, dot, dash, underscore")


def writable_root(root: Path) -> None:
    """Makes the folder of runs and tries to write in it. Raises RunDirError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        private_folder(probe := root / f".probe-{secrets.token_hex(4)}")
        probe.rmdir()
    except OSError as error:
        raise RunDirError(f"{root} cannot be written ({error.strerror}): choose another folder") from error


def runs_root(flag: str | Path | None = None) -> Path:
    """Where runs are kept: the flag, else `RIDETHROUGH_RUNS`, else `./runs`; absolute. Creates nothing."""
    return Path(flag or os.environ.get("RIDETHROUGH_RUNS") or "runs").absolute()


class RunDir:
    """One run's folder. Any process may read it; only the launcher's side (agent, coordinator, command line)
    writes `run.json`. Workers only add files below `events`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises RunDirError when there is no readable `run.json` of a known schema."""
        run = cls(Path(path).absolute())
        run.run_json()
        return run

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def incidents_dir(self) -> Path:
        return self.path / "incidents"

    @property
    def fired_dir(self) -> Path:
        return self.path / "fired"

    def run_json(self) -> dict[str, Any]:
        """The parsed `run.json`. Raises RunDirError if it is missing, damaged or of a newer schema."""
        file = self.path / "run.json"
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise RunDirError(f"{self.path} is no run folder (no run.json): name a folder below runs/") from None
        except (OSError, ValueError) as error:
            raise RunDirError(f"{file} cannot be read ({error}): choose another run") from error
        if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
            raise RunDirError(f"{file} is not a run's description: choose another run")
        if data["schema"] > SCHEMA:
            raise RunDirError(f"{file} has schema {data['schema']}, this version reads {SCHEMA}: upgrade ridethrough")
        if missing := _KEYS - data.keys():
            raise RunDirError(f"{file} is damaged ({', '.join(sorted(missing))} missing): choose another run")
        return data

    def finish(self, code: int, reason: str) -> None:
        """Write the result (exit code and one line) into `run.json`; atomic, the last call wins."""
        data = self.run_json()
        data["result"] = {"code": code, "reason": reason, "ended": _wall_iso()}
        write_private(self.path / "run.json", _dump(data))


def create_run(
    root: Path, *, run_id: str | None, config: dict[str, Any], command: list[str], schedule_hash: str | None
) -> RunDir:
    """Create `root/<run_id>` (a fresh id if None), or open it again when it has the same config and schedule.

    An empty config agrees with any: a coordinator alone knows none, and the first agent fills it in.
    Folders get mode 0700 and files 0600 whatever the umask is. Raises RunDirError: a bad id, a folder that is
    not ours, another config (both hashes and the differing keys are named), a place that cannot be written.
    """
    run_id = _fresh_id() if run_id is None else run_id
    check_run_id(run_id)
    run = RunDir(Path(root).absolute() / run_id)
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        if not (run.path / "run.json").exists():
            _describe(run, config, command, schedule_hash)
        _agree(run, config, schedule_hash)
        for name in _FOLDERS:
            private_folder(run.path / name)
        if run.run_json()["result"] is not None:  # the same job goes on
            write_private(run.path / "run.json", _dump({**run.run_json(), "result": None}))
    except OSError as error:
        raise RunDirError(
            f"run folder {run.path} cannot be written ({error.strerror}): choose another with --runs DIR"
        ) from error
    return run


def is_done(path: Path, config: dict[str, Any]) -> bool:
    """Whether a run of this config stands there and has ended with 0. Reads only; never raises."""
    try:
        there = RunDir(path).run_json()
    except RunDirError:
        return False
    return there["config_hash"] == config_hash(config) and (there["result"] or {}).get("code") == 0


def private_folder(path: Path) -> None:
    """Make the folder (mode 0700 even under a lax umask) unless it is there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    path.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically with one of mode 0600; flushed to the disk before it takes the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    _write_new(temporary, data)
    os.replace(temporary, path)


def _describe(run: RunDir, config: dict[str, Any], command: list[str], schedule_hash: str | None) -> None:
    private_folder(run.path)
    if not run.path.is_dir() or any(entry.name[0] != "." for entry in run.path.iterdir()):
        if (run.path / "run.json").exists():
            return  # another process was quicker; compared next
        raise RunDirError(f"{run.path} exists and is no run folder: choose another --run-id or --runs DIR")
    data = {
        "schema": SCHEMA,
        "run_id": run.run_id,
        "created": _wall_iso(),
        "command": list(command),
        "config": config,
        "config_hash": config_hash(config),
        "schedule_hash": schedule_hash,
        "versions": _versions(),
        "host": socket.gethostname(),
        "result": None,
    }
    temporary = run.path / f".run.json.{os.getpid()}.{secrets.token_hex(4)}"
    _write_new(temporary, _dump(data))
    try:
        os.link(temporary, run.path / "run.json")  # unlike a rename, this fails if another process was quicker
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _agree(run: RunDir, config: dict[str, Any], schedule_hash: str | None) -> None:
    there = run.run_json()
    if config and there["config"] == {}:  # made by a coordinator, which does not know the script
        there = {**there, "config": config, "config_hash": config_hash(config), "schedule_hash": schedule_hash}
        write_private(run.path / "run.json", _dump(there))
    if not config:
        return
    if there["config_hash"] != config_hash(config):
        raise RunDirError(
            f"run folder {run.path} belongs to another config ({there['config_hash']} there, "
            f"{config_hash(config)} here): {_differing(there['config'], config)}; "
            "use the same settings or another --run-id"
        )
    if there["schedule_hash"] != schedule_hash:
        raise RunDirError(
            f"run folder {run.path} belongs to another fault schedule ({there['schedule_hash']} there, "
            f"{schedule_hash} here); use the same schedule or another --run-id"
        )


def differences(there: dict[str, Any], here: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys (nested ones dotted) whose values differ, with both values; a missing key counts as None."""
    left, right = flat_config(there), flat_config(json.loads(json.dumps(here, default=str)))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def _differing(there: dict[str, Any], here: dict[str, Any], most: int = 6) -> str:
    pairs = differences(there, here)
    shown = [f"{key} is {a!r} there, {b!r} here" for key, (a, b) in list(pairs.items())[:most]]
    return "; ".join(shown) + (f"; and {len(pairs) - most} more" if len(pairs) > most else "")


def flat_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    if not isinstance(config, dict):
        return {prefix.removesuffix("."): config}
    out: dict[str, Any] = {}
    for key, value in config.items():
        out.update(flat_config(value, f"{prefix}{key}."))
    return out


def _fresh_id() -> str:
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def _wall_iso() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"ridethrough": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1, default=str).encode() + b"\n"


def _write_new(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(data)
        file.flush()
        os.fsync(fd)
