"""`--policy FILE`: limits and budgets of recovery from a JSON file, as `ridethrough calibrate --json` writes it.

Beside the settings the file may hold `"around": {"pod_grace_s": 30, ...}`, limits of what is around the job: they are
only looked at, so that none fires while one inside it still waits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridethrough.cli.usage import fail, usage_errors

if TYPE_CHECKING:
    from ridethrough.generation.policy import Policy

_TABLE = "docs/policy.md and `python -m ridethrough.generation.policy` list all settings"

PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help='Limits and budgets as JSON, like {"eval_limit_s": 120}; `ridethrough calibrate --json` writes one.',
        rich_help_panel="Recovery",
    ),
]
Observe = Annotated[
    bool,
    typer.Option(
        "--observe",
        help="Judge hangs but act on none: records the verdicts and the longest intervals, for `calibrate`.",
        rich_help_panel="Recovery",
    ),
]


# What commands take as an option of their own, and its setting. Read from the context, so no command repeats it.
_OPTIONS = {
    "max_restarts": "max_restarts",
    "stop_grace": "stop_grace_s",
    "node_wait": "node_wait_s",
    "lease": "lease_s",
    "observe": "observe",
}


def read_policy(ctx: typer.Context, file: Path | None, more: Mapping[str, tuple[str, Any]] | None = None) -> Policy:
    """What was given on the command line goes before the file, the file before the defaults. Exits with 2 on a file
    that is none; limits that do not nest are told on standard error, one line for each pair. `more`: setting -> (name
    of the command's parameter, the value that was made of it)."""
    from pydantic import ValidationError

    from ridethrough.generation.limits import check_limits
    from ridethrough.generation.policy import Policy
    from ridethrough.launch.uplink import BEAT_S

    fields: dict[str, Any] = {}
    around: dict[str, float] = {}
    if file is not None:
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            fail(f"--policy {file} cannot be read ({error.strerror}); give a JSON file")
        except ValueError as error:
            fail(f"--policy {file} is no JSON ({error}); `ridethrough calibrate --json` writes one")
        if isinstance(fields, dict) and isinstance(fields.get("policy"), dict):
            fields = fields["policy"]  # calibrate's, which has its reasons beside it
        if not isinstance(fields, dict):
            fail(f'--policy {file}: give a JSON object, like {{"eval_limit_s": 120}}')
        around = _around(file, fields.pop("around", {}))
    own = {name: (option, ctx.params[option]) for option, name in _OPTIONS.items() if option in ctx.params}
    for name, (parameter, value) in {**own, **(more or {})}.items():
        source = ctx.get_parameter_source(parameter)
        if name not in fields or (source is not None and source.name == "COMMANDLINE"):
            fields[name] = value
    try:
        policy = Policy(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if name in Policy.model_fields:
            fail(f"--policy {file}: {name} is {first['input']!r}: {first['msg']}; {_TABLE}")
        near = " or ".join(get_close_matches(name, Policy.model_fields, n=3, cutoff=0.5))
        fail(f"--policy {file}: there is no setting {name}{f', perhaps {near}' if near else ''}; {_TABLE}")
    with usage_errors(ValueError):
        wrong = check_limits(policy, **{"heartbeat_s": BEAT_S, **around})
    for line in wrong:
        print(f"ridethrough: warning: {line}", file=sys.stderr)
    return policy


def _around(file: Path, given: Any) -> dict[str, float]:
    if not isinstance(given, dict) or not all(isinstance(value, (int, float)) for value in given.values()):
        fail(f'--policy {file}: around is {given!r}; give seconds by name, like {{"pod_grace_s": 30}}')
    return given
