"""`ridethrough data`: what the reference job trains on."""

from __future__ import annotations

from ridethrough.cli.command import App
from ridethrough.train.prepare import command

app = App(no_args_is_help=True)


@app.callback()
def root() -> None:
    """What the reference job trains on: token shards, made once before training."""


app.command("prepare")(command)
