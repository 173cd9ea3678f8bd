"""The run that a command is about: a folder, an id, the beginning of one, or `latest`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridethrough.cli.usage import fail, usage_errors
from ridethrough.ledger.rundir import RunDirError, runs_root

if TYPE_CHECKING:
    from ridethrough.ledger.summary import RunLedger
    from ridethrough.report.index import Index

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, its folder, or `latest`.")
]
RunOrLatest = Annotated[
    str, typer.Argument(metavar="[RUN]", help="A run's id, the beginning of one, or its folder; else the latest.")
]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="Where runs are kept; else RIDETHROUGH_RUNS, else ./runs."),
]


def find(runs: Path | None, name: str) -> Path:
    """The run's folder. Exits with 2 if there is none, or more than one."""
    from ridethrough.report.index import find_run

    with usage_errors(RunDirError):
        return find_run(runs_root(runs), name)


def read(path: Path, end_ns: int | None = None) -> RunLedger:
    """The run's ledger. Exits with 2 if it can't be read."""
    from ridethrough.ledger.reading import LedgerError
    from ridethrough.ledger.summary import read_run

    with usage_errors(RunDirError, LedgerError):
        try:
            return read_run(path, end_ns)
        except OSError as error:
            fail(f"{error.filename or path} cannot be read ({error.strerror})")


@contextlib.contextmanager
def index_of(runs: Path | None, *, rebuild: bool = False) -> Iterator[Index]:
    """The refreshed index over the root. Exits with 2 if there is no such folder."""
    from ridethrough.report.index import Index

    with usage_errors(RunDirError):
        index = Index(runs_root(runs))
    with index:
        try:
            index.refresh(rebuild=rebuild)
        except OSError as error:
            fail(f"{error.filename or index.root} cannot be read ({error.strerror}): name another root with --runs DIR")
        yield index
