"""A model of nodes, agents and workers around the generation machine, which checks what the machine says.

Messages to and from each node stay in order, may be delayed for any time and come twice. Agents obey; workers obey, or
are stuck. Time passes only when `pass_time` is called.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.membership import WorkerState
from ridethrough.generation.plan import NodePlan, Plan
from ridethrough.generation.policy import Policy

UNCHARGED = ("node_loss", "preemption")
_REASONS = ("fault_declared", "incident", "ask_step")
LEASE_S = 5.0
JUDGE_S = 8.0


@dataclass
class Process:
    id: str
    node: str
    local_rank: int
    state: WorkerState = "starting"
    generation: int = 0
    stuck: bool = False
    unkillable: bool = False
    stop_at: int | None = None


@dataclass
class Agent:
    id: str
    name: str
    plan: NodePlan | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    inbox: deque[m.Action] = field(default_factory=deque)
    outbox: deque[m.Event] = field(default_factory=deque)
    known: bool = False
    lost_at_s: float | None = None
    cut: bool = False
    alive: bool = True


class World:
    """One job: its coordinator (or none at present), its nodes, and its clock."""

    def __init__(
        self, *, num_workers: int, min_nodes: int, max_nodes: int, policy: Policy, total_steps: int = 10_000
    ) -> None:
        self.num_workers, self.min_nodes, self.max_nodes, self.policy = num_workers, min_nodes, max_nodes, policy
        self.total_steps = total_steps
        self.now_s = 100.0
        self.agents: dict[str, Agent] = {}
        self.machine: GenerationMachine | None = None
        self.epoch = -1
        self.done: m.JobDone | None = None
        self.step = 0
        self.num_steps_since = 0
        self.plans: dict[tuple[int, int], Plan] = {}
        self.incidents: list[m.IncidentDecided] = []
        self.actions: list[m.Action] = []
        self.heard: list[m.Event] = []  # by the present coordinator
        self.killed: set[str] = set()
        self._reasons: set[str] = set()  # why the last plan's generation ended
        self._num_nodes = 0
        self._hung_s: dict[tuple[str, int], float] = {}
        self.start_coordinator()

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        self.epoch += 1
        self.heard.clear()
        self.killed.clear()
        self.machine = GenerationMachine(
            num_workers=self.num_workers,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            policy=self.policy,
            epoch=self.epoch,
            earlier=max((plan.generation for plan in self.plans.values()), default=0),
        )
        for agent in self.agents.values():
            agent.inbox.clear()
            agent.outbox.clear()
            agent.known = False
            if agent.alive and not agent.cut:
                self._introduce(agent)

    def crash_coordinator(self) -> None:
        self.machine = None

    def tell(self, event: m.Event) -> list[m.Action]:
        """Gives the machine an event and checks and sends what comes out."""
        machine = self.machine
        if machine is None or self.done is not None:
            return []
        before = (machine.phase, machine.generation)
        actions = machine.handle(event, self.now_s)
        self._check(machine, event, before, actions)
        for action in actions:
            self._send(action)
        return actions

    def _send(self, action: m.Action) -> None:
        self.actions.append(action)
        if isinstance(action, m.JobDone):
            self.done = action
        elif isinstance(action, m.IncidentDecided):
            self.incidents.append(action)
        elif isinstance(action, m.Kill):
            self.killed.add(action.worker)
        if isinstance(action, (m.JobDone, m.IncidentDecided, m.AllOut, m.FaultDeclared)):
            pass
        elif (agent := self.agents.get(action.node)) is not None and agent.known:
            agent.inbox.append(action)

    # --- what the machine says must be true --------------------------------------------------------------------------

    def _check(
        self, machine: GenerationMachine, event: m.Event, before: tuple[str, int], actions: list[m.Action]
    ) -> None:
        phase, generation = before
        told = {a.node: a.plan for a in actions if isinstance(a, m.Enter)}
        assert len({part.key for part in told.values()}) <= 1, "one plan at a time"
        for action in actions:
            if isinstance(action, m.Dismiss) and "cannot be ended" in action.reason:
                agent = self.agents[action.node]
                late = agent.cut or agent.inbox or agent.outbox or not agent.alive
                assert late or any(p.unkillable for p in agent.processes.values()), "given up without need"
        self._reasons |= {action.kind for action in actions if action.kind in _REASONS}
        if told:
            assert machine.plan is not None
            if "fault_declared" in self._reasons or (self.plans and "ask_step" not in self._reasons):
                assert "incident" in self._reasons, "a generation that was ended by a fault has its incident"
            self._reasons.clear()
            self._check_plan(machine, machine.plan, generation)
            assert Plan.from_parts(next(iter(told.values())), told) == machine.plan, "each member is told its part"
        if isinstance(event, m.WorkerFaulted) and phase != "learning":
            if event.report.generation != generation and phase != "forming":
                assert machine.generation == generation or told, "an old report ends nothing"
                assert machine.phase == phase, "an old report ends nothing"
            elif phase == "running" and event.report.generation == generation:
                assert machine.phase != "running" or told, "a report for the present generation ends it"
        if machine.phase != "done":
            assert machine.history.restarts <= self.policy.max_restarts, "over the budget, and still going"
            assert machine.history.no_progress <= self.policy.max_no_progress
        self._audit(machine)

    def _check_plan(self, machine: GenerationMachine, plan: Plan, generation: int) -> None:
        key = (plan.epoch, plan.generation)
        assert key not in self.plans, "one plan per generation"
        assert plan.generation > generation
        self.plans[key] = plan
        members = plan.members()
        assert [rank for rank, *_ in members] == list(range(plan.world_size)), "ranks are contiguous"
        assert all(len(n.workers) == self.num_workers for n in plan.nodes)
        assert len({w for *_, w in members}) == plan.world_size, "one rank per process"
        assert not {w for *_, w in members} & self.killed, "nobody who is being ended is in a plan"
        assert self.min_nodes <= len(plan.nodes) <= self.max_nodes
        standby = {n.id for n in machine.members.standby}
        assert not standby & {n.node for n in plan.nodes}, "a standby is not in the world"
        prefixes = [p.prefix for p in self.plans.values()]
        assert len(set(prefixes)) == len(prefixes), "a key prefix of its own"

    def _audit(self, machine: GenerationMachine) -> None:
        members = machine.members
        workers = members.workers()
        for state, count in members.counts.items():
            assert count == sum(w.state == state for w in workers)
        assert members.num_active == len(members.active)
        assert [n.place for n in members.active] == [members.place_of(n.id) for n in members.active]
        slots = [s for n in members.active for s in n.slots]
        assert members.full() == (bool(members.active) and not members.num_holes and None not in slots)
        assert [(n.id, i) for n, i in members.free_slots()] == [
            (n.id, i) for n in members.active for i, s in enumerate(n.slots) if s is None
        ]

    # --- nodes -------------------------------------------------------------------------------------------------------

    def join(self, name: str | None = None) -> Agent:
        self._num_nodes += 1
        agent = Agent(f"n{self._num_nodes}", name or f"host{self._num_nodes}")
        self.agents[agent.id] = agent
        if self.machine is not None:
            self._introduce(agent)
        return agent

    def _introduce(self, agent: Agent) -> None:
        agent.known = True
        agent.inbox.clear()
        agent.outbox.clear()
        if agent.plan is None:
            agent.processes.clear()
            event: m.Event = m.NodeJoined(node=agent.id, name=agent.name, num_workers=self.num_workers)
        else:
            snapshots = tuple(
                m.WorkerSnapshot(worker=p.id, local_rank=p.local_rank, state=p.state, attached=p.state != "starting")
                for p in agent.processes.values()
            )
            event = m.NodeRejoined(node=agent.id, name=agent.name, plan=agent.plan, workers=snapshots)
        agent.outbox.append(event)

    def lose(self, agent: Agent) -> None:
        """Everything on the node is gone; its lease tells."""
        agent.alive = False
        agent.processes.clear()
        agent.lost_at_s = self.now_s + LEASE_S

    def leave(self, agent: Agent) -> None:
        agent.alive = False
        agent.processes.clear()
        agent.outbox.append(m.NodeLeft(node=agent.id))

    def cut(self, agent: Agent) -> None:
        """No message comes through; peers on other nodes see their connections break."""
        agent.cut = True
        agent.lost_at_s = self.now_s + LEASE_S

    def heal(self, agent: Agent) -> None:
        agent.cut = False
        agent.lost_at_s = None
        if not agent.known and self.machine is not None:
            self._introduce(agent)

    # --- processes ---------------------------------------------------------------------------------------------------

    def hang(self, process: Process, *, unkillable: bool) -> None:
        """Once in state D, a process stays there: a signal that it has been sent will not be sent again."""
        process.stuck = True
        process.unkillable |= unkillable

    def processes(self) -> list[Process]:
        return [p for a in self.agents.values() if a.alive for p in a.processes.values()]

    def die(self, process: Process, *, killed_by_us: bool = False, signal: int | None = 9, code: int = 0) -> None:
        agent = self.agents[process.node]
        del agent.processes[process.id]
        report = None
        if signal is not None or code:
            report = FaultReport(
                generation=process.generation,
                worker=process.id,
                node=process.node,
                fault_class="sigkill" if signal else "exit",
                detected_by="waitpid",
                signal=signal,
                exit_code=code or None,
                step=self.step + 1 if process.state == "inside" else None,
                killed_by_us=killed_by_us,
            )
        agent.outbox.append(m.WorkerExited(worker=process.id, report=report))

    def fail(self, process: Process, cause: str = "ValueError: bad", fault_class: str = "exception") -> None:
        """Raises inside of a generation: reports, comes out, is ready."""
        agent = self.agents[process.node]
        report = FaultReport.model_validate(
            {
                "generation": process.generation,
                "worker": process.id,
                "node": process.node,
                "fault_class": fault_class,
                "detected_by": "exception",
                "step": self.step + 1,
                "cause": cause,
            }
        )
        agent.outbox.append(m.WorkerFaulted(report=report))
        self._come_out(process)

    def _come_out(self, process: Process) -> None:
        process.state, process.stop_at = "ready", None
        self.agents[process.node].outbox.append(m.WorkerReady(worker=process.id, left=process.generation))

    # --- delivery ----------------------------------------------------------------------------------------------------

    def deliver_event(self, agent: Agent, *, twice: bool = False) -> None:
        if agent.cut or not agent.outbox or self.machine is None:
            return
        event = agent.outbox.popleft()
        self.tell(event)
        if not isinstance(event, (m.NodeJoined, m.NodeRejoined, m.NodeLeft, m.Notice)):
            self.heard.append(event)
        if twice:
            self.tell(event)

    def deliver_action(self, agent: Agent) -> None:
        if agent.cut or not agent.alive or not agent.inbox:
            return
        self._obey(agent, agent.inbox.popleft())

    def _obey(self, agent: Agent, action: m.Action) -> None:
        found = agent.processes
        if isinstance(action, m.Spawn):
            for before in [p for p in found.values() if p.local_rank == action.local_rank]:
                assert before.unkillable or before.stuck, f"{before} holds the slot of {action}"
            found[action.worker] = Process(action.worker, agent.id, action.local_rank)
        elif isinstance(action, m.OpenStore):
            agent.outbox.append(m.StoreOpened(serial=action.serial, endpoint=f"{agent.id}:{action.serial}"))
        elif isinstance(action, m.Enter):
            agent.plan = action.plan
            for worker in action.plan.workers:
                if (process := found.get(worker)) is not None:
                    assert process.state == "ready", f"{process} is to enter {action.plan.generation}"
                    process.state, process.generation = "entering", action.plan.generation
        elif isinstance(action, m.Leave):
            for process in list(found.values()):
                inside = process.state in ("entering", "inside", "finished")
                if inside and process.generation == action.generation and not process.stuck:
                    self._come_out(process)
        elif isinstance(action, m.Kill):
            if action.worker in found and not found[action.worker].unkillable:
                self.die(found[action.worker], killed_by_us=True)
        elif isinstance(action, m.AskStep):
            for process in found.values():
                if process.generation == action.generation and process.state in ("inside", "finished"):
                    agent.outbox.append(m.StepAt(worker=process.id, generation=process.generation, step=self.step + 1))
        elif isinstance(action, m.StopAt):
            for process in found.values():
                if process.generation == action.generation and process.state == "inside":
                    process.stop_at = action.step
        elif isinstance(action, m.Dismiss):
            agent.alive = False
            found.clear()

    # --- time --------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for agent in self.agents.values():
            if agent.lost_at_s is not None and self.now_s >= agent.lost_at_s:
                agent.lost_at_s = None
                agent.known = False
                agent.inbox.clear()
                agent.outbox.clear()
                self.tell(m.NodeLeft(node=agent.id, lost=True))
        self.tell(m.Tick())

    def work(self) -> None:
        """What the processes do by themselves: come up, form groups, step, fall out of broken groups, finish."""
        for process in self.processes():
            if process.state == "starting" and not process.stuck:
                self._come_out(process)
        worlds: dict[tuple[int, int], Plan] = {}
        for agent in self.agents.values():
            if agent.alive and agent.plan is not None:
                worlds[agent.plan.key] = self.plans[agent.plan.key]
        for plan in worlds.values():
            self._work_in(plan)

    def _work_in(self, plan: Plan) -> None:
        found: list[Process] = []
        broken = False
        for _, _, node, worker in plan.members():
            agent = self.agents[node]
            process = agent.processes.get(worker) if agent.alive and not agent.cut else None
            behind = agent.plan is None or agent.plan.generation < plan.generation
            if process is None or (process.generation != plan.generation and not behind) or process.state == "ready":
                broken = broken or process is None or not behind
            elif process.generation == plan.generation:
                found.append(process)
        free = [p for p in found if not p.stuck and p.state in ("entering", "inside")]
        if broken:
            for process in free:
                self.fail(process, "RuntimeError: Connection closed by peer", "collective")
            return
        if len(found) < plan.world_size:
            return
        if any(p.stuck for p in found):
            self._judge(plan, found)
            return
        for process in free:
            if process.state == "entering":
                process.state = "inside"
                event = m.WorkerEntered(worker=process.id, generation=plan.generation)
                self.agents[process.node].outbox.append(event)
            elif process.stop_at is not None and self.step >= process.stop_at:
                self._finish(process, stopped=True)
            elif self.step >= self.total_steps:
                self._finish(process, stopped=False)
        if all(p.state == "inside" for p in found):
            self.step += 1
            self.num_steps_since += 1
            for ranks in plan.nodes:
                event2 = m.Progress(node=ranks.node, generation=plan.generation, step=self.step)
                self.agents[ranks.node].outbox.append(event2)

    def _finish(self, process: Process, *, stopped: bool) -> None:
        process.state = "finished"
        self.agents[process.node].outbox.append(
            m.WorkerFinished(worker=process.id, generation=process.generation, step=self.step, stopped=stopped)
        )

    def _judge(self, plan: Plan, found: list[Process]) -> None:
        """Ranks that stand still inside are found after a while, as the heartbeat's judge does it."""
        for process in found:
            if process.stuck and process.state == "inside":
                since = self._hung_s.setdefault((process.id, plan.generation), self.now_s)
                if self.now_s - since >= JUDGE_S:
                    report = FaultReport(
                        generation=plan.generation,
                        worker=process.id,
                        node=process.node,
                        fault_class="hang",
                        detected_by="heartbeat",
                        phase="step",
                        step=self.step + 1,
                    )
                    self.agents[process.node].outbox.append(m.WorkerFaulted(report=report))

    # --- calm --------------------------------------------------------------------------------------------------------

    def flush(self, rounds: int = 200) -> None:
        """Everything that is under way arrives, and what comes of it, without time passing."""
        for _ in range(rounds):
            if not any((a.outbox or (a.inbox and a.alive)) and not a.cut for a in self.agents.values()):
                return
            for agent in list(self.agents.values()):
                while agent.outbox and not agent.cut and self.machine is not None and self.done is None:
                    self.deliver_event(agent)
                while agent.inbox and not agent.cut and agent.alive:
                    self.deliver_action(agent)
            if self.machine is None or self.done is not None:
                return

    def settle(self, limit_s: float = 5000.0) -> bool:
        """Nothing bad happens any more. True once a step is done by the newest plan's world, or the job has ended; also
        if it hangs where nobody can tell."""
        if self.machine is None:
            self.start_coordinator()
        for agent in self.agents.values():
            if agent.cut and agent.alive:
                self.heal(agent)
        self.num_steps_since = 0
        end_s = self.now_s + limit_s
        dt = 0.25
        while self.now_s < end_s:
            self.flush()
            if self.done is not None:
                return True
            self.work()
            self.flush()
            if self.done is not None or (self.num_steps_since > 1 and self._newest_is_running()):
                return True
            if self._hangs_before_rt_run():
                return True
            self.pass_time(dt)
            dt = min(dt * 1.05, 10.0)
        return False

    def _hangs_before_rt_run(self) -> bool:
        """Every process, and none ever came there: that looks like a script that doesn't use it and works for long."""
        if self.machine is None or self.machine._attached_ever or not self.processes():
            return False
        return all(p.stuck and p.state == "starting" for p in self.processes())

    def _newest_is_running(self) -> bool:
        return self.machine is not None and self.machine.phase == "running"
