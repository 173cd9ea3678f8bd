"""Command-line options of the reference job, one per field of TrainConfig. No torch here."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from ridethrough.train.config import ConfigError, TrainConfig, parse

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps its click

_METAVAR: dict[Any, str] = {int: "INT", int | None: "INT", float: "FLOAT", float | None: "FLOAT"}


def parse_args(argv: list[str]) -> TrainConfig:
    """Options -> config. ConfigError on a wrong one; `--help` prints and raises SystemExit(0). No torch."""
    app = typer.Typer(add_completion=False)
    app.command(name="train", help="Train the reference Llama on text.")(_command())
    try:
        result = app(args=argv, prog_name="ridethrough train", standalone_mode=False)
    except _UsageError as e:
        raise ConfigError(f"{str(e).rstrip('.')}; `ridethrough train --options` lists the options") from None
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
