"""`ridethrough`: the command line. Each command is a file of its own, imported when it is called.

To add one, write `cli/<name>.py` with a typer `app` and add its row to COMMANDS; the row's text is what `--help` shows,
so that listing the commands imports none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from ridethrough.cli.command import App, Command, Group
from ridethrough.generation.exit_codes import ExitCode
from ridethrough.version import __version__

COMMANDS = {
    "demo": ("ridethrough.cli.demo", "The main job with its proof: train through faults, compare the bits."),
    "run": ("ridethrough.cli.run", "Launch a script protected."),
    "coordinator": ("ridethrough.cli.coordinator", "The coordinator alone, so that any training machine may die."),
    "train": ("ridethrough.cli.train", "The reference job: a Llama with FSDP2 on real text."),
    "data": ("ridethrough.cli.data", "Token shards for it, from text or a Hugging Face data set: prepare."),
    "status": ("ridethrough.cli.status", "What a run is doing now: step, goodput, checkpoints, open incident."),
    "runs": ("ridethrough.cli.runs", "All runs: ls, show, search, compare, note, export."),
    "report": ("ridethrough.cli.report", "Write a run's HTML report."),
    "dash": ("ridethrough.cli.dash", "All runs in the browser, those that live as they go."),
    "metrics": ("ridethrough.cli.metrics", "Prometheus metrics, alert rules, Grafana dashboard."),
    "alert": ("ridethrough.cli.alert", "Watch a run and tell of incidents, recoveries and what recurs; webhook."),
    "advise": ("ridethrough.cli.advise", "What to change: interval, time limits, spares; what recovery costs."),
    "calibrate": ("ridethrough.cli.calibrate", "Time limits from the longest seen of each phase."),
    "schema": ("ridethrough.cli.schema", "The ledger's events as JSON Schema."),
    "ckpt": ("ridethrough.cli.ckpt", "Checkpoints: list, show, verify, prune, export."),
    "env": ("ridethrough.cli.env", "Versions, machine, limits and GPUs, for a bug report."),
    "exit-codes": ("ridethrough.cli.exit_codes", "Exit codes and whether an orchestrator should try again."),
    "faults": ("ridethrough.cli.faults", "Fault schedules (plan) and kinds of fault (kinds)."),
    "chaos": ("ridethrough.cli.chaos", "Campaigns: many jobs through other faults each, every one proved."),
    "bench": ("ridethrough.cli.bench", "Measure recovery and checkpoints beside every peer."),
    "simulate": ("ridethrough.cli.simulate", "Goodput of a fleet on paper: 16 to 100,000 GPUs."),
    "k8s": ("ridethrough.cli.k8s", "Kubernetes: one file to a protected job; submit, status, logs, collect, delete."),
}
"""Command -> (module with `app`, one line of help), in the order of `--help`."""


class LazyGroup(Group):
    """A group that shows stubs and loads a command's module only to run it or to complete its options."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in COMMANDS:
            return Command(cmd_name, help=COMMANDS[cmd_name][1])
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in COMMANDS and name not in self.commands:
            command = typer.main.get_command(import_module(COMMANDS[name][0]).app)
            command.name = name
            self.commands[name] = command
        return super().resolve_command(ctx, args)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"ridethrough {__version__}")
        raise typer.Exit


app = App(cls=LazyGroup, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Keeps PyTorch training jobs productive through faults.

    Each command explains itself with --help and takes --json [FILE] where it prints a table. Runs go to --runs DIR,
    else RIDETHROUGH_RUNS, else ./runs. Exit code 2 is bad usage; `ridethrough exit-codes` lists the others.
    """


_UsageError: Any = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps its click


def main() -> None:
    """Entry of the console script and of `python -m ridethrough`. A wrong option costs one line and exit code 2."""
    try:
        code = app(prog_name="ridethrough", standalone_mode=False)
    except _UsageError as error:
        name = error.ctx.command_path if error.ctx is not None else "ridethrough"
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            sys.stderr.write(f"{name}: {error.format_message().rstrip('.')}; `{name} --help` lists the options\n")
        code = int(ExitCode.USAGE)
    except typer.Abort:
        code = 130
    code = code if isinstance(code, int) else 0
    if "torch" in sys.modules:
        from ridethrough.launch.script import end_process

        end_process(code)  # the interpreter takes a second and more to take torch apart
    sys.exit(code)


if __name__ == "__main__":
    main()
