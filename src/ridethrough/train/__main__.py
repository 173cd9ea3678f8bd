"""The reference job as a script: `python -m ridethrough.train --preset tiny --steps 200`.

Runs under `ridethrough run`, under torchrun, and as one plain process. `ridethrough train` parses the same options.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from typing import Any

import typer

from ridethrough.train.config import ConfigError, TrainConfig, check, parse

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps its click

_METAVAR: dict[Any, str] = {int: "INT", int | None: "INT", float: "FLOAT", float | None: "FLOAT"}


def parse_args(argv: list[str]) -> TrainConfig:
    """Options -> config. ConfigError on a wrong one; `--help` prints and raises SystemExit(0). No torch."""
    app = typer.Typer(add_completion=False)
    app.command(name="train", help="Train the reference Llama on text.")(_command())
    try:
        result = app(args=argv, prog_name="ridethrough train", standalone_mode=False)
    except _UsageError as e:
        raise ConfigError(f"{str(e).rstrip('.')}; `ridethrough train --help` lists the options") from None
    if not isinstance(result, TrainConfig):  # --help
        raise SystemExit(result or 0)
    return result


def _command() -> Any:
    """A typer command with one option per field of TrainConfig, so that each is described once."""

    def command(**values: Any) -> TrainConfig:
        return parse({name: value for name, value in values.items() if value is not None})

    parameters, annotations = [], {}
    for name, field in TrainConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        kind = bool if field.annotation is bool else str  # the rest is parsed by pydantic, with one-line errors
        names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
        shown = "" if field.default is None else f" [default: {field.default}]"
        metavar = None if kind is bool else _METAVAR.get(field.annotation, "TEXT")
        option = typer.Option(None, *names, help=f"{field.description}{shown}", show_default=False, metavar=metavar)
        annotations[name] = kind | None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = annotations
    return command


def main(argv: list[str] | None = None) -> None:
    """Parse, check and train. Exits with 2 and one line on standard error if an option cannot be used."""
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv)
        if "RIDETHROUGH_AGENT" not in os.environ:  # under the launcher it has been checked before the ranks started
            check(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as e:
        print(f"ridethrough train: {e}", file=sys.stderr)
        raise SystemExit(2) from None

    from ridethrough.restart.entry import run
    from ridethrough.restart.groups import forget_meshes
    from ridethrough.train.loop import train

    run(functools.partial(train, config=config))
    # A process group that is alive when the interpreter ends may abort it: its thread then drops a tensor that Python
    # knows, wants the GIL, and is unwound through C++ (seen in 1 of 20 exits). DTensor's caches keep it alive.
    forget_meshes()
    gc.collect()


if __name__ == "__main__":
    main()
