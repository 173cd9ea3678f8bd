"""What goes into the generation machine (events) and what comes out (actions). All of it travels as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ridethrough.generation.faults import FaultReport
from ridethrough.generation.membership import WorkerState
from ridethrough.generation.plan import NodePlan

PROTOCOL = 1


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


# --- events: what happened -------------------------------------------------------------------------------------------


class NodeJoined(_Message):
    """An agent is there. `node` is its incarnation (unique), `name` the stable host or pod name. `place` is its wish
    among the nodes' places, met where it is free."""

    kind: Literal["node_joined"] = "node_joined"
    node: str
    name: str
    num_workers: int
    place: int | None = None


class WorkerSnapshot(_Message):
    """A worker as its agent knows it, for a coordinator that has just been started again."""

    worker: str
    local_rank: int
    state: WorkerState
    attached: bool


class NodeRejoined(_Message):
    """An agent that was a member under an earlier coordinator says what it is: its part of the last plan it was told
    of, and its workers."""

    kind: Literal["node_rejoined"] = "node_rejoined"
    node: str
    name: str
    plan: NodePlan
    workers: tuple[WorkerSnapshot, ...]


class NodeLeft(_Message):
    """An agent is gone: it said so, or its lease ended (`lost`)."""

    kind: Literal["node_left"] = "node_left"
    node: str
    lost: bool = False


class NodeUnfit(_Message):
    """A rank that leaves the generation found a health check failed that takes a node out (`evict_on`): another node
    should have this one's place."""

    kind: Literal["node_unfit"] = "node_unfit"
    node: str
    generation: int
    why: str


class WorkerReady(_Message):
    """A worker is outside of any generation and can enter the next one. `left` is the last generation it was in."""

    kind: Literal["worker_ready"] = "worker_ready"
    worker: str
    left: int = 0
    inventory: dict[str, Any] = Field(default_factory=dict)


class WorkerEntered(_Message):
    """The worker's process group is up and the training function has been called."""

    kind: Literal["worker_entered"] = "worker_entered"
    worker: str
    generation: int


class WorkerFaulted(_Message):
    """Any participant's report; the first one for the present generation ends it for all."""

    kind: Literal["worker_faulted"] = "worker_faulted"
    report: FaultReport


class WorkerExited(_Message):
    """A worker process is gone. `report` says how, unless it ended well."""

    kind: Literal["worker_exited"] = "worker_exited"
    worker: str
    report: FaultReport | None = None


class WorkerFinished(_Message):
    """The training function returned. `stopped`: because of a planned stop, after step `step`."""

    kind: Literal["worker_finished"] = "worker_finished"
    worker: str
    generation: int
    step: int = 0
    stopped: bool = False


class Progress(_Message):
    """The highest step that some rank of the node has finished (from the heartbeat pages)."""

    kind: Literal["progress"] = "progress"
    node: str
    generation: int
    step: int
    resumed_at: int | None = Field(None, description="Step of the state that the generation began from, if known.")


class StoreOpened(_Message):
    """The store asked for by `OpenStore` listens at `endpoint` (host:port)."""

    kind: Literal["store_opened"] = "store_opened"
    serial: int
    endpoint: str


class StopRequested(_Message):
    """Preemption notice, SIGTERM or the operator: end in a planned way within `grace_s`."""

    kind: Literal["stop_requested"] = "stop_requested"
    cause: str
    code: int
    grace_s: float


class Notice(_Message):
    """One node will go away within `grace_s` (preemption, drain): the others go on without it after a last save."""

    kind: Literal["notice"] = "notice"
    node: str
    cause: str
    grace_s: float


class StepAt(_Message):
    """A worker's answer to `AskStep`: the step it is in; it will not begin another one before `StopAt`."""

    kind: Literal["step_at"] = "step_at"
    worker: str
    generation: int
    step: int


class Situation(_Message):
    """Where a rank is, for finding out who holds up the others.

    `within_cap`: it is in a phase that may take long, and has not yet; `overdue`: its own limit is over, `late`: more
    than half of it. `groups`: collectives begun, by the process group's key. `silent`: none of its Python threads has
    run for a while. `since_ns` is its last sign of progress, on its own host's monotonic clock.
    """

    worker: str = ""
    pid: int = 0
    phase: str
    step: int
    collectives: int = 0
    groups: dict[str, int] = Field(default_factory=dict)
    within_cap: bool = False
    overdue: bool = False
    late: bool = False
    silent: bool = False
    since_ns: int = 0


class HangSuspected(_Message):
    """Ranks of one node stand still. Whether they are guilty or wait for others only all nodes together can tell."""

    kind: Literal["hang_suspected"] = "hang_suspected"
    node: str
    generation: int
    age_s: float
    deadline_s: float
    situations: dict[int, Situation]


class Inspected(_Message):
    """A node's answer to `Inspect`: its ranks' situations."""

    kind: Literal["inspected"] = "inspected"
    node: str
    generation: int
    situations: dict[int, Situation]


class Tick(_Message):
    """Time passes; sent several times a second so that limits are noticed."""

    kind: Literal["tick"] = "tick"


Event = Annotated[
    NodeJoined
    | NodeRejoined
    | NodeLeft
    | NodeUnfit
    | WorkerReady
    | WorkerEntered
    | WorkerFaulted
    | WorkerExited
    | WorkerFinished
    | Progress
    | StoreOpened
    | StopRequested
    | Notice
    | StepAt
    | HangSuspected
    | Inspected
    | Tick,
    Field(discriminator="kind"),
]

# --- actions: what is to be done -------------------------------------------------------------------------------------


class OpenStore(_Message):
    """Open a fresh store for process groups on this node and answer with `StoreOpened`."""

    kind: Literal["open_store"] = "open_store"
    node: str
    serial: int


class Spawn(_Message):
    """Start a worker process for a slot of a node. The ranks are what the next plan is expected to say."""

    kind: Literal["spawn"] = "spawn"
    node: str
    worker: str
    local_rank: int
    rank: int
    group_rank: int
    num_nodes: int
    world_size: int
    store: str
    prefix: str
    restarts: int


class Enter(_Message):
    """Tell the node's workers to enter the plan's generation."""

    kind: Literal["enter"] = "enter"
    node: str
    plan: NodePlan


class Leave(_Message):
    """Tell the node's workers to leave the generation at once. `why` is for people."""

    kind: Literal["leave"] = "leave"
    node: str
    generation: int
    why: str


class Kill(_Message):
    """End one worker's whole process tree with SIGKILL."""

    kind: Literal["kill"] = "kill"
    node: str
    worker: str
    why: str


class AskStep(_Message):
    """A planned stop begins: each worker answers with `StepAt` and holds at its next step boundary."""

    kind: Literal["ask_step"] = "ask_step"
    node: str
    generation: int
    cause: str


class StopAt(_Message):
    """Every rank finishes this step, saves, and returns from the training function."""

    kind: Literal["stop_at"] = "stop_at"
    node: str
    generation: int
    step: int


class Inspect(_Message):
    """A hang is suspected somewhere: say at once where the node's ranks are."""

    kind: Literal["inspect"] = "inspect"
    node: str
    generation: int


class Dismiss(_Message):
    """This node has no part in the job any more: its agent ends its workers, and itself with this code."""

    kind: Literal["dismiss"] = "dismiss"
    node: str
    code: int
    reason: str


class FaultDeclared(_Message):
    """The machine has taken a report into the incident of this generation (for the ledger)."""

    kind: Literal["fault_declared"] = "fault_declared"
    report: FaultReport


class AllOut(_Message):
    """Every survivor has left the generation (for the ledger)."""

    kind: Literal["all_out"] = "all_out"
    generation: int


class IncidentDecided(_Message):
    """The root cause is known and the rung of the ladder is chosen (for the ledger and for people)."""

    kind: Literal["incident"] = "incident"
    id: str
    generation: int
    root: FaultReport
    secondary: tuple[FaultReport, ...]
    rung: str
    attempts: int
    why: str


class JobDone(_Message):
    """The job is over. Code 0 is success; others as in `ridethrough exit-codes`."""

    kind: Literal["job_done"] = "job_done"
    code: int
    reason: str


Action = Annotated[
    OpenStore
    | Spawn
    | Enter
    | Leave
    | Kill
    | AskStep
    | StopAt
    | Inspect
    | Dismiss
    | FaultDeclared
    | AllOut
    | IncidentDecided
    | JobDone,
    Field(discriminator="kind"),
]

event_adapter: TypeAdapter[Event] = TypeAdapter(Event)
action_adapter: TypeAdapter[Action] = TypeAdapter(Action)
