"""What the long search of `test_machine_property` has found, as it was shrunk: one short story each."""

from __future__ import annotations

from typing import Any

import pytest
from test_machine_property import AnyJob
from world import World

from ridethrough.generation import messages as m


def begun(**settings: Any) -> AnyJob:
    """Two nodes with one rank each that train."""
    job = AnyJob()
    usual = {"num_workers": 1, "nodes": (2, 0), "max_restarts": 100, "cordon_after": 0, "last_call_s": 0.0}
    job.begin(**{**usual, "num_standby": 0, "running": True, "total_steps": 10_000, **settings})
    return job


def obey(world: World) -> None:
    for agent in world.agents.values():
        while agent.inbox:
            world.deliver_action(agent)


def test_a_process_that_cannot_be_ended_costs_its_node_however_often_it_hangs() -> None:
    job = begun()
    job.a_process_hangs(index=0, unkillable=True)
    while not job.world.killed:
        job.everything_arrives()
    obey(job.world)
    job.a_process_hangs(index=0, unkillable=False)
    job.teardown()
    assert job.world.done is not None and "of at least 2 nodes" in job.world.done.reason
    assert [a.node for a in job.world.actions if isinstance(a, m.Dismiss)] == ["n1"]


def test_a_standby_that_is_lost_and_comes_back_while_a_coordinator_learns_is_there() -> None:
    job = begun(num_standby=1)
    first, second, standby = job.world.agents.values()
    job.the_coordinator_is_started_again()
    job.world.deliver_event(first)
    job.world.deliver_event(standby)
    job.world.cut(standby)
    job.time_passes(6.0)
    job.world.heal(standby)
    job.world.deliver_event(standby)
    job.world.flush()
    job.world.lose(second)
    job.teardown()
    assert job.world.done is None
    assert job.world.machine is not None and job.world.machine.plan is not None
    assert [n.node for n in job.world.machine.plan.nodes] == [first.id, standby.id]


@pytest.mark.parametrize("told", [0, 1])
def test_a_standby_that_comes_first_to_a_restarted_coordinator_takes_nobodys_place(told: int) -> None:
    """`told`: how many nodes of the plan come back; without all of them the plan that follows has its incident."""
    job = begun(num_standby=2)
    world = job.world
    first, second, *standby = world.agents.values()
    job.the_coordinator_is_started_again()
    world.lose(second)
    if not told:
        world.lose(first)
    for agent in standby:
        world.deliver_event(agent)
        world.deliver_action(agent)
    before = len(world.incidents)
    assert world.settle()
    (incident,) = world.incidents[before:]
    assert (incident.root.fault_class, incident.rung, incident.generation) == ("node_loss", "replace_node", 1)
    assert world.machine is not None and world.machine.generation == 2
    assert [n.id for n in world.machine.members.active][:told] == [first.id][:told]


def test_a_script_whose_processes_all_hang_before_rt_run_looks_like_one_without_it() -> None:
    job = begun(running=False)
    job.world.flush()
    assert len(job.world.processes()) == 2
    for process in job.world.processes():
        job.world.hang(process, unkillable=False)
    for _ in range(20):
        job.time_passes(40.0)
        job.everything_arrives()
    assert not job.world.killed, "nobody came to rt.run, so nobody waits for them there"
    job.teardown()
    assert job.world.done is None and job.world.machine is not None and job.world.machine.phase == "forming"
