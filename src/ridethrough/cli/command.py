"""How each command is declared, read and explained, so that all are alike.

    app = App()

    @app.command()
    def show(name: Annotated[str, typer.Argument()], json: JsonOption = None) -> None: ...

Options may be written with `-` or `_`, `-h` is `--help`, and a `--json` may stand without its file. The help is plain
text that fits 80 columns: no name is cut, and a line that begins with four spaces in the docstring is shown as it is,
so that an example can be copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from ridethrough.cli.json_option import with_json_value


class Command(TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_json = any("--json" in parameter.opts for parameter in self.params)
        return super().parse_args(ctx, with_json_value(args) if takes_json else args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        _write_text(self.help, formatter)
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """Commands below a name."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        _write_text(self.help, formatter)
        shown = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command)) for name, command in shown.items()])
        _write_options(self, ctx, formatter)


class App(typer.Typer):
    """A typer app of such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": Group, "add_completion": False, "context_settings": _CONTEXT, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        context = {**_CONTEXT, **settings.pop("context_settings", {})}
        return super().command(name, cls=Command, context_settings=context, **settings)


def dashed(name: str) -> str:
    """The name of an option as we spell it."""
    return name.replace("_", "-")


_CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": dashed}


def _write_text(text: str | None, formatter: Any) -> None:
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        formatter.write_paragraph()
        if paragraph.startswith("    "):
            formatter.write("".join(f"    {line.strip()}\n" for line in paragraph.splitlines()))
        else:
            with formatter.indentation():
                formatter.write_text(paragraph)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """The options by panel, in the order in which the command names them."""
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(ctx):
        row = parameter.get_help_record(ctx)
        if row is not None:
            named = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or named, []).append(row)
    for title, rows in panels.items():
        with formatter.section(title):
            formatter.write_dl(rows)


def _first_sentence(command: Any) -> str:
    text = inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")
