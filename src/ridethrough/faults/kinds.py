"""The kinds of fault: what each does, what the ledger should call it, and how it fires.

To add one, write its `fire` next to its likes (`hangs.py`, `deaths.py`), add a row here, and a test that a real
process suffers it. `ridethrough faults kinds` prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridethrough.faults import deaths, hangs
from ridethrough.faults.draw import Draw
from ridethrough.faults.shot import InjectedFault, Shot

HANG_VARIANTS = ("hang_loop", "hang_lock", "hang_skip_collective")
"""What `hang` is drawn among: all can be freed inside the process."""


def _no_args(draw: Draw, label: str) -> dict[str, Any]:
    return {}


def _always_allowed(args: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    `does`, `fires`, `freed_by`: one clause each, for people. `ledger_class`: the class its incident should carry, None
    if it should open none. `ends_generation`: whether a generation should end by it. `fire` runs in the main
    thread of the guilty rank at the phase's entry. `draw_args` fixes at plan time what would else be left to chance.
    `guard` runs when the injector is installed and raises FaultRefused where firing would harm more than the job.
    """

    name: str
    does: str
    fires: str
    freed_by: str
    ledger_class: str | None
    fire: Callable[[Shot], None]
    ends_generation: bool = True
    draw_args: Callable[[Draw, str], dict[str, Any]] = _no_args
    guard: Callable[[Mapping[str, Any]], None] = _always_allowed


def _raise(shot: Shot) -> None:
    raise InjectedFault(f"injected {shot.fault}")


def _hang(shot: Shot) -> None:
    KINDS[str(shot.args["variant"])].fire(shot)


def _slow(shot: Shot) -> None:
    """Sleep at each entry into a step, from here on for `num_steps` steps or to the generation's end."""
    last = shot.step + int(shot.args["num_steps"]) - 1
    extra_s = float(shot.args["extra_s"])

    def later(phase: str, step: int) -> bool:
        if phase == "step" and step <= last:
            hangs.sleep_s(extra_s)
        return step > last

    hangs.sleep_s(extra_s)
    shot.follow(later)


_IN_PLACE = "a signal handler that raises in the main thread"
_KILL = "SIGKILL only"

_ROWS = (
    Kind("exception", "raises InjectedFault", "raise in the main thread", "itself", "exception", _raise),
    Kind(
        "hang",
        "one of the three hangs that can be freed in process, drawn at plan time into args",
        "as the drawn variant",
        _IN_PLACE,
        "hang",
        _hang,
        draw_args=lambda draw, label: {"variant": draw.choice(HANG_VARIANTS, label)},
    ),
    Kind("hang_loop", "endless Python loop: busy, never trains", "a loop of bytecode", _IN_PLACE, "hang", hangs.loop),
    Kind("hang_lock", "waits for a lock that nobody frees", "second acquire of a lock", _IN_PLACE, "hang", hangs.lock),
    Kind(
        "hang_skip_collective",
        "leaves one collective out and waits for its result; the peers wait in it",
        "the next collective that Python issues is not sent",
        _IN_PLACE,
        "hang",
        hangs.skip_collective,
    ),
    Kind(
        "hang_native",
        "dead-locks in native code with the GIL free",
        "second lock of a pthread mutex, GIL released",
        _KILL,
        "hang",
        hangs.native_gil_free,
    ),
    Kind(
        "hang_native_gil",
        "dead-locks in native code holding the GIL: no Python thread runs",
        "second lock of a pthread mutex, GIL held",
        _KILL,
        "hang",
        hangs.native_gil_held,
    ),
    Kind("sigstop", "stops the process", "SIGSTOP to itself", "SIGCONT or SIGKILL", "hang", deaths.sigstop),
    Kind("sigkill", "kills the process at once", "SIGKILL to itself", "-", "sigkill", deaths.sigkill),
    Kind(
        "sigsegv", "segmentation fault in native code", "reads address 0; no core file", "-", "sigsegv", deaths.sigsegv
    ),
    Kind("sigabrt", "aborts as a failed native check does", "abort(); no core file", "-", "signal", deaths.sigabrt),
    Kind(
        "exit",
        "leaves with a status that is not 0, without clean-up",
        "os._exit(args.code)",
        "-",
        "exit",
        deaths.exit_code,
        draw_args=lambda draw, label: {"code": 17},
    ),
    Kind(
        "oom",
        "takes memory until the kernel kills it; refused without a cgroup limit below the machine's memory",
        "64 MiB at a time, with its own oom_score_adj at the highest",
        "-",
        "oom",
        deaths.oom,
        guard=deaths.guard_oom,
    ),
    Kind(
        "slow",
        "degraded rank: each of the next args.num_steps steps takes args.extra_s longer",
        "sleeps at the step's start",
        "itself",
        None,
        _slow,
        ends_generation=False,
        draw_args=lambda draw, label: {"num_steps": 10, "extra_s": 0.5},
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ROWS}


def register(kind: Kind) -> None:
    """Add a kind of your own, before planning and in each worker (for instance in a module named in
    RIDETHROUGH_OBSERVERS). Raises ValueError if the name is taken."""
    if kind.name in KINDS:
        raise ValueError(f"fault kind {kind.name!r} exists: choose another name")
    KINDS[kind.name] = kind
