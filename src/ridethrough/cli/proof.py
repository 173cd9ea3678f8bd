"""The reference job beside its undisturbed twin, as `demo` runs it once and `chaos run` many times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from ridethrough.cli.launching import check_machine
from ridethrough.cli.live import follow
from ridethrough.cli.usage import usage_errors
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.schedule import Schedule
from ridethrough.ledger.rundir import private_folder
from ridethrough.ledger.summary import RunLedger, ledger_summary, read_run

# The options of the reference job, spelled alike in `demo` and `chaos run`.
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes, on this machine's CPUs or GPUs.")]
CheckpointEvery = Annotated[int, typer.Option("--checkpoint-every", min=1, help="Steps between saves.")]
Preset = Annotated[str, typer.Option("--preset", help="Model: tiny, small, 1b, llama3.1-8b.")]
Data = Annotated[
    str | None, typer.Option("--data", metavar="PATH", help="Text to train on; else Python's own sources.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, order of samples and dropout.")]


@dataclass(frozen=True)
class ReferenceJob:
    """`settings` are the job's own (preset, steps, ...), the same for all runs; `out` gets the live lines; `options` go
    to `ridethrough train` as they are."""

    settings: Mapping[str, Any]
    num_ranks: int
    root: Path
    out: TextIO
    options: tuple[str, ...] = ()

    def run(self, run_id: str, title: str, schedule: Schedule | None = None) -> int:
        """Trains below the root, under the schedule; returns the exit code."""
        argv = ["train", "--nproc-per-node", str(self.num_ranks), "--runs", str(self.root), "--quiet"]
        argv += self.options
        for key, value in self.settings.items():
            argv += ["--" + key.replace("_", "-"), str(value)]
        with _written(schedule, self.root / f"{run_id}.plan") as options:
            argv += [*options, "--run-id", run_id]
            return follow(argv, self.root / run_id, total=self.settings["steps"], title=title, out=self.out)

    def read(self, run_id: str) -> RunLedger | None:
        """What the run's events say; None if it ended before it had a folder."""
        return read_run(self.root / run_id) if (self.root / run_id / "run.json").exists() else None

    def logs(self, run_id: str) -> Path:
        return self.root / run_id / "logs"

    def final_hash(self, run_id: str) -> str | None:
        """Of the run's last parameters and optimizer state."""
        found: str | None = ledger_summary(read_run(self.root / run_id))["final_hash"]
        return found


@contextlib.contextmanager
def _written(schedule: Schedule | None, folder: Path) -> Iterator[Sequence[str]]:
    if schedule is None:
        yield []
        return
    private_folder(folder)
    plan = folder / "faults.json"
    schedule.save(plan)
    try:
        yield ["--fault-schedule", str(plan)]
    finally:
        plan.unlink()
        folder.rmdir()


def reference_settings(preset: str, steps: int, seed: int, checkpoint_every: int, data: str | None) -> dict[str, Any]:
    """Settings of a job in which every rank's random stream, each save and each evaluation matter to the result."""
    settings: dict[str, Any] = {
        "preset": preset,
        "steps": steps,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "dropout": 0.1,
        "eval_every": max(1, steps // 4),
    }
    return settings if data is None else {**settings, "data": data}


def check_reference(settings: Mapping[str, Any], num_ranks: int) -> None:
    """Exits with 2 if this job cannot be, or this machine cannot hold it."""
    from ridethrough.train.config import ConfigError, check, parse

    with usage_errors(ValueError, ConfigError):
        check_machine(num_ranks)
        check(parse(dict(settings)), num_ranks)


def why_void(ledger: RunLedger, schedule: Schedule | None, control_hash: str | None) -> list[str]:
    """What keeps a run from being a proof: a result that is not the undisturbed one, a planned fault that never fired,
    one that fired and is of no incident. Empty if it is one."""
    result = ledger_summary(ledger, control_hash=control_hash)
    planned = schedule.faults if schedule is not None else ()
    fired = {event["id"] for event in ledger.events if event["kind"] == "fault_injected"}
    seen = {fault for incident in ledger.incidents for fault in incident.injected}
    missing = [fault.id for fault in planned if fault.id not in fired]
    unseen = [fault.id for fault in planned if fault.id in fired - seen and KINDS[fault.kind].ledger_class]
    why = []
    if result["bitwise_equal"] is not True:
        why.append(f"the result is {result['final_hash']}, undisturbed it is {control_hash}")
    if missing:
        why.append(f"these planned faults never fired: {', '.join(missing)}")
    if unseen:
        why.append(f"these faults fired and no incident is theirs: {', '.join(unseen)}")
    return why
