"""The ledger's vocabulary: states of a slot, kinds of event and their fields, in one table.

`ridethrough schema` prints `json_schema()`; docs/ledger.md explains it; `problems(event)` checks one event. A
reader must ignore kinds and fields that it does not know: within schema 1 both may be added, none changes meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

SCHEMA = 1

STATES: dict[str, str] = {
    "queued": "asked for, not yet running (between two jobs of one run, pod pending)",
    "launch": "process start and imports, until the training function is called for the first time",
    "init": "from the call of the training function to the loop: model build, compile, first collective",
    "restore": "finding, verifying and loading a state",
    "step": "a step that counts in the end",
    "lost_step": "a step done and rolled back",
    "partial_step": "the part of a step cut off by a fault",
    "data_wait": "waiting for the loader inside the loop",
    "snapshot_stall": "training blocked by a save",
    "eval": "validation",
    "detect": "from the fault until it is declared; for the peers, from when they wait for it",
    "teardown": "declared until every survivor has left the training function",
    "rebuild": "from there until the training function is called again: plan, processes, process group",
    "finish": "from the last step to the end of the process: last save, drain",
    "degraded": "a slot missing in a shrunken world",
    "unattributed": "none of the above; above 0.5 % is a warning",
}
UP = frozenset(
    ["init", "restore", "step", "lost_step", "partial_step", "data_wait", "snapshot_stall", "eval", "finish"]
)  # the machines run the job; the rest is infrastructure down time
UNATTRIBUTED_WARNING = 0.005  # of wall x slots

FaultClass = Literal[
    "exception",
    "hang",
    "collective",
    "sigkill",
    "sigsegv",
    "exit",
    "oom",
    "signal",
    "node_loss",
    "gpu",
    "corruption",
    "preemption",
]
Rung = Literal["in_process", "replace_process", "replace_node", "shrink", "give_up"]
Detector = Literal["exception", "waitpid", "heartbeat", "collective", "lease", "user"]
CLASSES: list[str] = list(get_args(FaultClass))
RUNGS: list[str] = list(get_args(Rung))
DETECTORS: list[str] = list(get_args(Detector))
STAGES = ["detect", "teardown", "rebuild", "init", "restore", "first_step"]  # of an incident, in order


@dataclass(frozen=True)
class Field:
    """One field: JSON type (`int`, `float`, `str`, `bool`, `list`, `any`; a trailing `?` allows null) and meaning."""

    type: str
    doc: str
    required: bool = True
    choices: tuple[str, ...] | None = None


def _i(doc: str) -> Field:
    return Field("int", doc)


def _s(doc: str, choices: list[str] | None = None) -> Field:
    return Field("str", doc, choices=tuple(choices) if choices else None)


def _optional(type: str, doc: str, choices: list[str] | None = None) -> Field:
    return Field(type, doc, required=False, choices=tuple(choices) if choices else None)


@dataclass(frozen=True)
class Kind:
    """One kind of event: who writes it, when, and its fields beside `t_ns` and `kind`."""

    roles: tuple[str, ...]
    doc: str
    fields: Mapping[str, Field]


_G = {"generation": _i("generation number of the plan it belongs to")}
_GR = {**_G, "rank": _i("rank, which is the slot")}
_LAUNCH = ("coordinator", "agent", "cli")
_AGENT = ("agent",)
_WORKER = ("worker",)
_PROCESS = {
    "worker": _s("worker id"),
    "pid": _i("process id"),
    "node": Field("any", "node name or number"),
    "rank": Field("int?", "rank it was given; null for a spare"),
}

KINDS: dict[str, Kind] = {
    "header": Kind(
        ("agent", "coordinator", "worker", "keeper", "cli"),
        "first line of a file, and again after lines were lost or a process id was used again",
        {
            "schema": _i("schema version"),
            "role": _s("role of the writing process"),
            "host": _s("host name"),
            "pid": _i("process id"),
            "boot_id": _s("the kernel's boot id: files that share it share the monotonic clock"),
            "mono_ns": _i("monotonic clock at this line"),
            "wall_ns": _i("wall clock (ns since 1970) at the same moment"),
            "version": _s("ridethrough's version"),
            "num_dropped": _optional("int", "events lost just before, because the disk refused them"),
        },
    ),
    "job_start": Kind(
        _LAUNCH,
        "the job begins: slots are in `launch` from here",
        {
            "slots": _i("ranks of the full world"),
            "nodes": Field("any", "nodes"),
            "run_id": _s("run id"),
            "policy": _optional("any", "settings of the policy that are not the default"),
        },
    ),
    "job_end": Kind(_LAUNCH, "the job is over", {"code": _i("exit code"), "reason": _s("one line")}),
    "worker_spawn": Kind(_AGENT, "a worker process was started or assigned", _PROCESS),
    "worker_exit": Kind(
        _AGENT,
        "a worker process was reaped",
        {
            **_PROCESS,
            "exit_code": Field("int?", "exit code, null if ended by a signal"),
            "signal": Field("int?", "signal number, or null"),
        },
    ),
    "plan": Kind(
        _LAUNCH,
        "a generation's fixed set of processes",
        {
            **_G,
            "epoch": _i("coordinator's epoch"),
            "world_size": _i("ranks of this generation"),
            "members": Field("list", "[{rank, local_rank, node, worker, pid}]"),
            "resume": Field("any", "what it resumes from", required=False),
        },
    ),
    "fault": Kind(
        _LAUNCH,
        "a fault report reached the coordinator; the first of a generation declares its end",
        {
            **_G,
            "rank": Field("int?", "rank that reports or died"),
            "worker": Field("str?", "worker id", required=False),
            "host": Field("str?", "host", required=False),
            "class": _s("class of the fault", CLASSES),
            "phase": Field("str?", "phase it was in", required=False),
            "step": Field("int?", "step it was in", required=False),
            "cause": Field("str?", "traceback or one line", required=False),
            "detected_by": _s("what saw it", DETECTORS),
            "fault_ns": Field("int?", "when it happened, if known", required=False),
            "root": _optional("bool", "true: the cause, not an effect"),
            "traceback": _optional("str?", "of the rank, if there is one"),
            "pid": Field("int?", "process id", required=False),
        },
    ),
    "all_out": Kind(_LAUNCH, "every survivor of the generation has left the training function", _G),
    "incident": Kind(
        _LAUNCH,
        "what the reports came to; written with the next plan, or when giving up",
        {
            "id": _s("incident id, folder below incidents/"),
            "class": _s("class of the root cause", CLASSES),
            "rank": Field("int?", "guilty rank"),
            "host": Field("str?", "its host"),
            "phase": Field("str?", "phase"),
            "step": Field("int?", "step"),
            **_G,
            "rung": _s("rung of the ladder taken", RUNGS),
            "detected_by": _s("what saw it", DETECTORS),
            "attempts": _i("generations tried for it so far"),
            "why": _optional("str?", "why the policy chose the rung"),
            "root_cause": Field("str?", "traceback or one line"),
            "declared_ns": _i("when it was declared"),
            "fault_ns": Field("int?", "when it happened, if known"),
            "all_out_ns": Field("int?", "when every survivor was out"),
            "secondary": Field("list", "[{rank, class, cause}]: effects of it"),
        },
    ),
    "notice": Kind(
        _LAUNCH,
        "a request to stop in a planned way",
        {"signal": _optional("any", "signal"), "notice": _optional("any", "kind")},
    ),
    "verdict": Kind(
        _AGENT,
        "the progress watch found a rank too old",
        {
            "rank": _i("rank"),
            "phase": _s("phase"),
            "step": Field("int?", "step"),
            "age_s": Field("float", "seconds since its last progress"),
            "deadline_s": Field("float", "seconds allowed"),
            "observe": Field("bool", "true: only noted, nothing was done"),
        },
    ),
    "intervals": Kind(
        _AGENT,
        "at the job's end: what limits are made from",
        {
            "longest_s": Field("any", "phase -> longest time seen in it, in seconds"),
            "deadline_s": Field("float", "the step's learned deadline at the end, in seconds"),
        },
    ),
    "health": Kind(
        _WORKER,
        "one check before a generation is entered again",
        {
            **_GR,
            "check": _s("its name"),
            "status": _s("verdict; UNAVAILABLE never takes anybody out", ["PASS", "FAIL", "UNAVAILABLE"]),
            "detail": _s("what was found"),
            "seconds": Field("float", "how long it took"),
        },
    ),
    "enter": Kind(_WORKER, "the training function is about to be called: `init` begins", _GR),
    "phase": Kind(
        _WORKER,
        "a long phase outside a step's record: load is `restore`, eval is `eval`, save is `snapshot_stall`",
        {
            **_GR,
            "phase": _s("phase", ["init", "load", "eval", "save"]),
            "edge": _s("begin or end", ["begin", "end"]),
            "step": Field("int?", "step", required=False),
        },
    ),
    "loop": Kind(
        _WORKER,
        "first instruction of the step loop",
        {**_GR, "step": _i("last finished step"), "total": _optional("int", "steps of the job when it is done")},
    ),
    "step": Kind(
        _WORKER,
        "a step is done; the interval [t0_ns, t1_ns) less its parts is `step`",
        {
            **_GR,
            "step": _i("step number, from 1"),
            "t0_ns": _i("begin"),
            "t1_ns": _i("end"),
            "parts": Field("list", "[[state, begin ns, end ns]] carved out: data_wait, snapshot_stall, eval"),
            "loss": _optional("float?", "whatever the user logs; also tokens and others"),
            "tokens": _optional("float?", "tokens of the step, of all ranks together"),
        },
    ),
    "leave": Kind(
        _WORKER,
        "the training function was left because of a fault",
        {**_GR, "cause": Field("str?", "why", required=False)},
    ),
    "left": Kind(
        _WORKER,
        "nothing of the generation is left in the process",
        {**_GR, "parts": Field("list", "[part, ns] each: unwound, cut, state, groups, gate: when each was done")},
    ),
    "resumed": Kind(
        _WORKER,
        "a state was loaded: finished steps above `step` of older generations are lost",
        {
            **_GR,
            "step": _i("finished steps in the state, 0 if fresh"),
            "tier": Field("str?", "memory, peer, disk ...", required=False),
            "source": Field("str?", "path", required=False),
        },
    ),
    "load": Kind(
        _WORKER,
        "a checkpointer has loaded: as `resumed`, and the `seconds` before it are `restore`",
        {
            **_GR,
            "step": _i("finished steps in the state, 0 if fresh"),
            "tier": Field("str?", "memory, peer, disk ...", required=False),
            "source": Field("str?", "path", required=False),
            "seconds": _optional("float", "how long it took"),
            "rejected": _optional("list", "[[path, reason]] that could not be used"),
        },
    ),
    "fault_injected": Kind(
        _WORKER,
        "the moment before an injected fault fires",
        {
            **_GR,
            "id": Field("any", "fault's id in the schedule"),
            "fault_kind": _s("kind"),
            "phase": _s("phase"),
            "step": Field("int?", "step"),
        },
    ),
    "finish": Kind(
        _WORKER,
        "the step loop is over",
        {**_GR, "step": _i("last finished step"), "stopped": _optional("bool", "true: a planned stop before the end")},
    ),
    "exit": Kind(_WORKER, "the worker's last words", {**_GR, "code": Field("int?", "exit code")}),
    "final": Kind(
        _WORKER,
        "the user's results",
        {
            **_GR,
            "final_hash": _optional("str", "hash over parameters and optimizer of all ranks"),
            "final_loss": _optional("float?", "last training loss"),
            "val_loss": _optional("float?", "last validation loss"),
        },
    ),
    "save": Kind(
        ("worker", "keeper"),
        "progress of one save",
        {
            "step": _i("step of the state"),
            "attempt": Field("any", "attempt's name", required=False),
            "event": _s("staged, committed, superseded, failed, ..."),
            "bytes": _optional("int?", "bytes"),
            "seconds": _optional("float?", "seconds it took"),
        },
    ),
    "memory": Kind(
        ("keeper",),
        "what memory holds for a recovery, every few seconds",
        {
            "step": _i("step of the newest state that is whole on all ranks"),
            "replicated": Field("bool", "another node has it too"),
            "replica_s": _optional("float?", "seconds that the last replication took"),
        },
    ),
    "host_memory": Kind(
        ("keeper",),
        "what the snapshots of a node took of its memory at most, every few seconds",
        {
            "bytes": _i("bytes of arenas, replicas included"),
            "queued": _i("saves that are being written or wait for storage"),
            "queued_bytes": _i("bytes of their shares on this node"),
        },
    ),
    "promise": Kind(
        _WORKER,
        "what the memory tier promises, after the first snapshots",
        {
            **_GR,
            "every": _i("steps from one snapshot to the next"),
            "step_s": Field("float", "seconds of a step without its snapshot"),
            "snapshot_s": Field("float", "seconds that a snapshot holds training up"),
            "replica_s": _optional("float?", "seconds of a replication"),
            "node_loss_steps": _optional("int?", "most steps that a lost node costs; none: memory does not survive it"),
        },
    ),
}

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "any": (object,),
}
_JSON = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array"}


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with one event by the table, one line each; unknown kinds and fields are no problem."""
    kind = KINDS.get(str(event.get("kind")))
    found = [] if isinstance(event.get("t_ns"), int) else ["t_ns is no integer"]
    for name, field in (kind.fields if kind else {}).items():
        if name not in event:
            if field.required:
                found.append(f"{event['kind']}.{name} is missing")
            continue
        value, type = event[name], field.type.removesuffix("?")
        if value is None and field.type.endswith("?"):
            continue
        if not isinstance(value, _TYPES[type]) or (isinstance(value, bool) and type in ("int", "float")):
            found.append(f"{event['kind']}.{name} is {value!r}, not {field.type}")
        elif field.choices and value not in field.choices:
            found.append(f"{event['kind']}.{name} is {value!r}, not one of {', '.join(field.choices)}")
    return found


def json_schema() -> dict[str, Any]:
    """The table as JSON Schema (draft 2020-12) of one event line, with the states and their meaning."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ridethrough ledger event",
        "x-schema-version": SCHEMA,
        "x-states": {name: {"doc": doc, "up": name in UP} for name, doc in STATES.items()},
        "oneOf": [_kind_schema(name, kind) for name, kind in KINDS.items()],
    }


def _kind_schema(name: str, kind: Kind) -> dict[str, Any]:
    return {
        "title": name,
        "description": kind.doc,
        "x-roles": list(kind.roles),
        "type": "object",
        "properties": {
            "t_ns": {"type": "integer", "description": "monotonic clock of the writing host"},
            "kind": {"const": name},
            **{key: _field_schema(field) for key, field in kind.fields.items()},
        },
        "required": ["t_ns", "kind", *(key for key, field in kind.fields.items() if field.required)],
    }


def _field_schema(field: Field) -> dict[str, Any]:
    out: dict[str, Any] = {"description": field.doc}
    base = field.type.removesuffix("?")
    if base != "any":
        out["type"] = [_JSON[base], "null"] if field.type.endswith("?") else _JSON[base]
    if field.choices:
        out["enum"] = list(field.choices)
    return out
