"""Bad usage: one line on standard error that says what to do, and exit code 2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer

from ridethrough.generation.exit_codes import ExitCode


def fail(message: str) -> NoReturn:
    """End the command as badly used. `message` is one line with the remedy."""
    sys.stdout.flush()
    sys.stderr.write(f"ridethrough: {message}\n")
    raise typer.Exit(int(ExitCode.USAGE))


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the given errors of lower rooms, whose messages are one line with the remedy, into bad usage."""
    try:
        yield
    except kinds as error:
        fail(str(error))
