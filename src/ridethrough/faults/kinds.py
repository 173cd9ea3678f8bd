"""The kinds of fault: what each does, what the ledger should call it, and how it fires.

To add one, write its `fire` next to its likes (`hangs.py`, `deaths.py`, ...), add a row here, and a test that a real
process suffers it. `ridethrough faults kinds` prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridethrough.faults import deaths, degraded, gpu, hangs, nodes, storage
from ridethrough.faults.draw import Draw
from ridethrough.faults.shot import InjectedFault, Shot
from ridethrough.ledger.schema import Detector, FaultClass, Rung

HANG_VARIANTS = ("hang_loop", "hang_lock", "hang_skip_collective")
"""What `hang` is drawn among: all can be freed inside the process."""


def _no_args(draw: Draw, label: str) -> dict[str, Any]:
    return {}


def _always_allowed(args: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    `does`, `fires`, `freed_by`, `needs`: one clause each, for people. `ledger_class`, `seen_by` and `rung`: what its
    incident should say, by whom it is detected and how recovered from; all None if there should be none. `fire` runs in
    the main thread of the guilty rank at the phase's entry. `draw_args` fixes at plan time what would else be left to
    chance. `guard` runs when the injector is installed, before the first step, and raises FaultRefused where firing
    would do nothing, or harm more than the job.
    """

    name: str
    does: str
    fires: str
    freed_by: str
    ledger_class: FaultClass | None
    fire: Callable[[Shot], None]
    seen_by: Detector | None = "exception"
    rung: Rung | None = "in_process"
    needs: str = "-"
    draw_args: Callable[[Draw, str], dict[str, Any]] = _no_args
    guard: Callable[[Mapping[str, Any]], None] = _always_allowed

    @property
    def ends_generation(self) -> bool:
        return self.rung is not None


def _raise(shot: Shot) -> None:
    raise InjectedFault(f"injected {shot.fault}")


def _hang(shot: Shot) -> None:
    KINDS[str(shot.args["variant"])].fire(shot)


_IN_PLACE = "a signal handler that raises in the main thread"
_KILL = "SIGKILL only"


def _hang_in_place(name: str, does: str, fires: str, fire: Callable[[Shot], None], **more: Any) -> Kind:
    return Kind(name, does, fires, _IN_PLACE, "hang", fire, seen_by="heartbeat", **more)


def _stuck(name: str, does: str, fires: str, freed_by: str, fire: Callable[[Shot], None]) -> Kind:
    return Kind(name, does, fires, freed_by, "hang", fire, seen_by="heartbeat", rung="replace_process")


def _death(
    name: str, does: str, fires: str, ledger_class: FaultClass, fire: Callable[[Shot], None], **more: Any
) -> Kind:
    return Kind(name, does, fires, "-", ledger_class, fire, seen_by="waitpid", rung="replace_process", **more)


def _gpu_error(name: str, does: str, fires: str, fire: Callable[[Shot], None]) -> Kind:
    return Kind(
        name, does, fires, "-", "gpu", fire, rung="replace_process", needs="a CUDA device", guard=gpu.guard_cuda
    )


def _node_gone(name: str, does: str, fires: str, freed_by: str, fire: Callable[[Shot], None], **more: Any) -> Kind:
    return Kind(name, does, fires, freed_by, "node_loss", fire, seen_by="lease", rung="replace_node", **more)


def _degraded(name: str, does: str, fires: str, freed_by: str, fire: Callable[[Shot], None], **more: Any) -> Kind:
    return Kind(name, does, fires, freed_by, None, fire, seen_by=None, rung=None, **more)


_ROWS = (
    Kind("exception", "raises InjectedFault", "raise in the main thread", "itself", "exception", _raise),
    _hang_in_place(
        "hang",
        "one of the three hangs that can be freed in process, drawn at plan time into args",
        "as the drawn variant",
        _hang,
        draw_args=lambda draw, label: {"variant": draw.choice(HANG_VARIANTS, label)},
    ),
    _hang_in_place("hang_loop", "endless Python loop: busy, never trains", "a loop of bytecode", hangs.loop),
    _hang_in_place("hang_lock", "waits for a lock that nobody frees", "second acquire of a lock", hangs.lock),
    _hang_in_place(
        "hang_skip_collective",
        "leaves one collective out and waits for its result; the peers wait in it",
        "the next collective that Python issues is not sent",
        hangs.skip_collective,
    ),
    _stuck(
        "hang_native",
        "dead-locks in native code with the GIL free",
        "second lock of a pthread mutex, GIL released",
        _KILL,
        hangs.native_gil_free,
    ),
    _stuck(
        "hang_native_gil",
        "dead-locks in native code holding the GIL: no Python thread runs",
        "second lock of a pthread mutex, GIL held",
        _KILL,
        hangs.native_gil_held,
    ),
    _stuck("sigstop", "stops the process", "SIGSTOP to itself", "SIGCONT or SIGKILL", deaths.sigstop),
    _death("sigkill", "kills the process at once", "SIGKILL to itself", "sigkill", deaths.sigkill),
    _death("sigsegv", "segmentation fault in native code", "reads address 0; no core file", "sigsegv", deaths.sigsegv),
    _death("sigabrt", "aborts as a failed native check does", "abort(); no core file", "signal", deaths.sigabrt),
    _death(
        "exit",
        "leaves with a status that is not 0, without clean-up",
        "os._exit(args.code)",
        "exit",
        deaths.exit_code,
        draw_args=lambda draw, label: {"code": 17},
    ),
    _death(
        "oom",
        "takes memory until the kernel kills it",
        "64 MiB at a time, with its own oom_score_adj at the highest",
        "oom",
        deaths.oom,
        needs="a memory cgroup smaller than the machine",
        guard=deaths.guard_oom,
    ),
    _gpu_error("device_assert", "an assertion fails in a kernel", "indexes a tensor out of range", gpu.device_assert),
    _gpu_error("illegal_access", "a kernel touches memory that is nobody's", "stores to address 0", gpu.illegal_access),
    _node_gone(
        "node_loss",
        "kills the node's agent, keeper and all ranks in one moment",
        "SIGKILL to the agent's whole tree",
        "-",
        nodes.node_loss,
        needs="several nodes; a standby, or a world that may shrink",
        guard=nodes.guard_several_nodes,
    ),
    _node_gone(
        "cut_network",
        "takes the node's network away; its processes live on",
        "interfaces but the loopback go down",
        "ip link set DEVICE up",
        nodes.cut_network,
        needs="as node_loss; root, and the node in a network namespace",
        guard=nodes.guard_own_network,
    ),
    Kind(
        "corrupt_save",
        "flips a byte of the newest checkpoint and finds it; the next load from storage rejects it",
        "at the first phase with two committed checkpoints",
        "itself",
        "corruption",
        storage.corrupt_save,
        needs="a Checkpointer",
    ),
    _degraded(
        "slow_storage",
        "each file operation of a save takes args.extra_s longer, for args.seconds",
        "sleeps in the node's keeper",
        "itself",
        storage.slow_storage,
        needs="a Checkpointer",
        draw_args=lambda draw, label: {"extra_s": 0.2, "seconds": 10.0},
        guard=storage.guard_file_hook,
    ),
    _degraded(
        "full_storage",
        "saves fail with ENOSPC for args.seconds: code 83, unless on_error='warn'",
        "raised in the node's keeper; no disk is filled",
        "itself",
        storage.full_storage,
        needs="a Checkpointer",
        draw_args=lambda draw, label: {"seconds": 10.0},
        guard=storage.guard_file_hook,
    ),
    _degraded(
        "memory_pressure",
        "holds args.mib of memory for args.num_steps steps",
        "writes each page of an anonymous map",
        "itself",
        degraded.memory_pressure,
        needs="twice that memory free",
        draw_args=lambda draw, label: {"mib": 512, "num_steps": 10},
        guard=degraded.guard_memory,
    ),
    _degraded(
        "slow",
        "degraded rank: each of the next args.num_steps steps takes args.extra_s longer",
        "sleeps at the step's start",
        "itself",
        degraded.slow,
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
