"""Any interleaving of losses, delays, repeats and restarts: the machine keeps its promises, and comes to an end.

What must hold after every event is checked in `world`; here are the things that may happen, and that from any state
training starts again or the job ends with a code, if nothing more happens.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from world import Agent, Process, World

from ridethrough.generation import messages as m
from ridethrough.generation.policy import Policy

INDEX = st.integers(0, 1000)
SELDOM = st.sampled_from([False, False, True])
KNOWN_CODES = {0, 2, 80, 81, 82, 83, 143}


class AnyJob(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.noticed: set[str] = set()

    @initialize(
        num_workers=st.integers(1, 3),
        nodes=st.tuples(st.integers(1, 3), st.integers(0, 2)),
        max_restarts=st.sampled_from([100, 3, 0]),
        cordon_after=st.sampled_from([0, 2]),
        last_call_s=st.sampled_from([0.0, 5.0]),
        num_standby=st.integers(0, 2),
        running=st.sampled_from([True, True, True, False]),
        total_steps=st.sampled_from([5, 10_000]),
    )
    def begin(
        self,
        num_workers: int,
        nodes: tuple[int, int],
        max_restarts: int,
        cordon_after: int,
        last_call_s: float,
        num_standby: int,
        running: bool,
        total_steps: int,
    ) -> None:
        policy = Policy(
            max_restarts=max_restarts,
            cordon_after=cordon_after,
            last_call_s=last_call_s,
            node_wait_s=30.0,
            grow_after_s=1.0,
            start_limit_s=60.0,
            grow_limit_s=30.0,
        )
        least, more = nodes
        self.world = World(num_workers=num_workers, min_nodes=least, max_nodes=least + more, policy=policy)
        self.world.total_steps = total_steps
        for _ in range(least + num_standby):
            self.world.join()
        if running:
            assert self.world.settle()
            self.world.settle()

    # --- the run of things -------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def processes_work(self) -> None:
        self.world.work()

    @rule()
    def everything_arrives(self) -> None:
        self.world.flush()
        self.world.work()
        self.world.flush()
        self.world.pass_time(0.2)

    @rule(index=INDEX, twice=st.booleans(), count=st.integers(1, 5))
    def something_arrives(self, index: int, twice: bool, count: int) -> None:
        agent = self.agent(index)
        for _ in range(count):
            self.world.deliver_event(agent, twice=twice)

    @rule(index=INDEX, count=st.integers(1, 5))
    def something_is_done(self, index: int, count: int) -> None:
        for _ in range(count):
            self.world.deliver_action(self.agent(index))

    @rule()
    def it_recovers(self) -> None:
        if self.world.machine is not None and self.world.done is None:
            assert self.world.settle()

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def agent(self, index: int) -> Agent:
        agents = list(self.world.agents.values())
        return agents[index % len(agents)]

    def live(self, index: int) -> Agent:
        agents = [a for a in self.world.agents.values() if a.alive] or [self.world.join()]
        return agents[index % len(agents)]

    def process(self, index: int) -> Process | None:
        found = self.world.processes()
        return found[index % len(found)] if found else None

    @precondition(lambda self: self.world.processes())
    @rule(index=INDEX, how=st.sampled_from(["sigkill", "exit", "quiet", "71"]))
    def a_process_dies(self, index: int, how: str) -> None:
        process = self.process(index)
        assert process is not None
        signal = 9 if how == "sigkill" else None
        self.world.die(process, signal=signal, code={"exit": 1, "71": 71}.get(how, 0))

    @precondition(lambda self: any(p.state == "inside" for p in self.world.processes()))
    @rule(index=INDEX, same=st.booleans())
    def a_process_raises(self, index: int, same: bool) -> None:
        inside = [p for p in self.world.processes() if p.state == "inside"]
        process = inside[index % len(inside)]
        self.world.fail(process, "ValueError: the same" if same else f"ValueError: {index}")

    @rule(index=INDEX)
    def a_node_is_unfit(self, index: int) -> None:
        agent = self.live(index)
        generation = agent.plan.generation if agent.plan is not None else 0
        agent.outbox.append(m.NodeUnfit(node=agent.id, generation=generation, why="check nic failed"))

    @precondition(lambda self: self.world.processes())
    @rule(index=INDEX, unkillable=st.sampled_from([False, False, False, True]))
    def a_process_hangs(self, index: int, unkillable: bool) -> None:
        process = self.process(index)
        assert process is not None
        self.world.hang(process, unkillable=unkillable)

    @rule(index=INDEX, really=SELDOM)
    def a_node_is_lost(self, index: int, really: bool) -> None:
        if really:
            self.world.lose(self.live(index))

    @rule(index=INDEX, really=SELDOM)
    def a_node_leaves(self, index: int, really: bool) -> None:
        if really:
            self.world.leave(self.live(index))

    @rule(index=INDEX, really=SELDOM)
    def a_node_gets_notice(self, index: int, really: bool) -> None:
        agent = self.live(index)
        if really:
            self.noticed.add(agent.id)
            agent.outbox.append(m.Notice(node=agent.id, cause="preempted", grace_s=10.0))

    @rule(index=INDEX, really=SELDOM)
    def a_link_is_cut(self, index: int, really: bool) -> None:
        if really:
            self.world.cut(self.live(index))

    @rule(index=INDEX)
    def a_link_heals(self, index: int) -> None:
        agent = self.live(index)
        if agent.cut:
            self.world.heal(agent)

    @rule(index=INDEX, same_name=st.booleans())
    def a_node_joins(self, index: int, same_name: bool) -> None:
        if len([a for a in self.world.agents.values() if a.alive]) < self.world.max_nodes + 2:
            self.world.join(self.agent(index).name if same_name else None)

    @rule()
    def the_coordinator_is_started_again(self) -> None:
        self.world.crash_coordinator()
        self.world.start_coordinator()

    @precondition(lambda self: self.world.heard)
    @rule(index=INDEX)
    def an_event_comes_again(self, index: int) -> None:
        heard = self.world.heard
        self.world.tell(heard[-1 - index % len(heard)])

    @precondition(lambda self: any(p.state == "finished" for p in self.world.processes()))
    @rule(index=INDEX)
    def a_finished_process_ends(self, index: int) -> None:
        finished = [p for p in self.world.processes() if p.state == "finished"]
        self.world.die(finished[index % len(finished)], signal=None)

    @rule(index=INDEX, back=st.integers(1, 3))
    def an_old_report_comes(self, index: int, back: int) -> None:
        machine, process = self.world.machine, self.process(index)
        if machine is None or process is None or machine.generation < 2:
            return
        self.world.tell(
            m.WorkerFaulted(
                report=m.FaultReport(
                    generation=machine.generation - back,
                    worker=process.id,
                    node=process.node,
                    fault_class="exception",
                    detected_by="exception",
                )
            )
        )

    @precondition(lambda self: self.world.step > 3)
    @rule(chance=st.integers(0, 9))
    def training_ends(self, chance: int) -> None:
        if chance == 7:
            self.world.total_steps = self.world.step + 1

    @rule(chance=st.integers(0, 19))
    def a_stop_is_requested(self, chance: int) -> None:
        if chance == 7:
            self.world.tell(m.StopRequested(cause="SIGTERM", code=143, grace_s=10.0))

    # --- and in the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.machine is not None and world.done is None:
            assert world.settle(), f"stuck in {world.machine.phase}, generation {world.machine.generation}"
            usable = [a for a in world.agents.values() if a.alive and a.known and a.id not in self.noticed]
            if len(usable) >= world.min_nodes and world.done is not None:
                assert "of at least" not in world.done.reason, "enough nodes were there"
        if world.done is not None:
            assert world.done.code in KNOWN_CODES or world.policy.max_restarts == 0, world.done


def run(max_examples: int, steps: int, **more: Any) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AnyJob,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_any_job() -> None:
    run(80, 40, derandomize=True)


@pytest.mark.campaign
def test_any_job_at_length() -> None:
    run(5000, 60)
