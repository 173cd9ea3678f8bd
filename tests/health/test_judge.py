"""The judge on made-up pages: who is guilty, when, and who never is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_world import START_S, World

from ridethrough.generation.policy import Policy

CAPS = Policy(
    init_limit_s=10, load_limit_s=10, first_step_limit_s=10, data_limit_s=10, save_limit_s=10, eval_limit_s=10
)


def test_the_rank_that_did_not_begin_the_collective_is_guilty_at_the_learned_deadline() -> None:
    world = World()
    world.train(1, 20, step_s=0.5)
    world.collective(0, 0, 1, 3)
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (2,)
    assert verdict.deadline_s == pytest.approx(2.0)
    assert 2.0 < verdict.age_s < 2.2


def test_a_deadline_has_a_floor_of_a_second() -> None:
    world = World()
    world.train(1, 40, step_s=0.01)
    world.collective(0, 1, 2, 3)
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (0,)
    assert verdict.deadline_s == 1.0


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_the_deadline_is_the_factor_times_a_step(factor: float) -> None:
    world = World(policy=Policy(hang_factor=factor))
    world.train(1, 20, step_s=0.5)
    world.collective(0, 0, 1, 3)
    verdict = world.run(10)
    assert verdict is not None and verdict.deadline_s == pytest.approx(factor * 0.5)


def test_a_finish_has_a_cap() -> None:
    for limit_s, guilty in ((5.0, (2,)), (50.0, None)):
        world = World(policy=Policy(finish_limit_s=limit_s))
        world.train(1, 20)
        world.phase("held", 0, 1, 3)
        world.phase("finish", 2)
        verdict = world.run(10)
        assert (verdict.guilty if verdict is not None else None) == guilty


def test_a_rank_that_hangs_after_its_last_collective_is_behind_by_a_step() -> None:
    world = World()
    world.train(1, 20)
    world.collective(0)
    world.now_s += 0.1
    world.step(21, 0, 1, 2, took_s=0.1)
    world.collective(0, 0, 1, 2)
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (3,)


def test_who_waits_in_one_group_is_not_guilty_in_another() -> None:
    """2 x 2 mesh: 3 hangs; 2 waits for it in their row, 1 in their column, 0 waits for 1, that is not free to come."""
    world = World()
    world.train(1, 20)
    world.set(0, groups=((0, 20), (12, 1)))
    world.set(1, groups=((0, 20), (11, 1), (12, 0)))
    world.set(2, groups=((0, 20), (10, 1)))
    world.set(3, groups=((0, 20), (10, 0), (11, 0)))
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (3,)


def test_of_ranks_that_look_alike_the_one_whose_threads_stand_still_is_guilty() -> None:
    world = World(policy=Policy(hang_floor_s=2))
    world.train(1, 20)
    world.frozen = {1}
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (1,)


def test_all_are_named_when_nothing_tells_them_apart() -> None:
    world = World()
    world.train(1, 20)
    verdict = world.run(10)
    assert verdict is not None and verdict.guilty == (0, 1, 2, 3)


def test_a_late_judge_gives_everybody_the_time_that_it_was_away() -> None:
    world = World()
    world.train(1, 20)
    world.now_s += 10.0  # agent and workers were stopped together
    assert world.run(0.5) is None
    world.step(21, took_s=10.5)
    world.train(21, 30)
    assert world.verdicts == []


def test_time_without_a_processor_counts_half_at_most() -> None:
    world = World()
    world.train(1, 20)
    begun_s = world.now_s
    while not world.verdicts and world.now_s < begun_s + 5:
        world.run(0.1)
        world.set(2, delay_ns=world.ranks[2].delay_ns + 90_000_000)
    assert 1.9 < world.now_s - begun_s < 2.3


@pytest.mark.parametrize("phase", ["data", "save", "eval"])
def test_a_slow_phase_is_no_hang_before_its_cap_and_one_after(phase: str) -> None:
    world = World(policy=CAPS)
    world.train(1, 20)
    world.phase(phase)
    assert world.run(6.0) is None
    world.phase("step")
    assert world.run(0.5) is None
    world.step(21, took_s=0.1)
    world.train(21, 30)
    world.phase(phase, 2)
    if phase == "save":  # it lies between two steps
        world.step(31, 0, 1, 3, took_s=0.1)
    world.collective(0, 0, 1, 3)
    verdict = world.run(15.0)
    assert verdict is not None
    assert (verdict.guilty, verdict.phase, verdict.deadline_s) == ((2,), phase, 10.0)
    assert 10.0 < verdict.age_s < 12.0


def test_peers_of_a_rank_that_saves_are_not_judged() -> None:
    world = World(policy=CAPS)
    world.train(1, 20)
    world.phase("save", 0)
    world.step(21, 1, 2, 3, took_s=0.1)
    world.collective(0, 1, 2, 3)
    assert world.run(9.0) is None


def test_a_rank_behind_peers_that_have_finished_is_judged_by_its_step() -> None:
    world = World(policy=CAPS)
    world.train(1, 20)
    world.phase("finish", 0, 1, 2)
    verdict = world.run(9.0)
    assert verdict is not None and verdict.guilty == (3,)
    assert verdict.age_s < 4.0


def test_a_rank_behind_peers_that_are_done_is_judged() -> None:
    world = World()
    world.train(1, 20)
    world.phase("held", 0, 1, 2)
    verdict = world.run(9.0)
    assert verdict is not None and verdict.guilty == (3,)


def test_a_first_step_has_its_own_cap_also_within_forward() -> None:
    world = World(policy=CAPS)
    world.run(0.1)
    world.step(1)
    world.phase("forward")
    assert world.run(6.0) is None
    world.step(2, took_s=6.0)
    for number in range(3, 300):
        assert world.run(0.1) is None
        world.step(number, took_s=0.1)
    for rank in world.ranks:  # the next generation: the learned deadline is known, the first step has another
        world.set(rank, generation=2, step=0, last_step_ns=0)
    world.phase("init")
    world.run(0.2)
    world.step(300)
    world.phase("forward")
    assert world.run(6.0) is None
    verdict = world.run(10.0)
    assert verdict is not None and verdict.phase == "forward" and verdict.deadline_s == 10.0


@pytest.mark.parametrize("phase", ["init", "load"])
def test_a_hang_in_each_starting_phase_is_found_at_its_cap(phase: str) -> None:
    world = World(policy=CAPS)
    world.phase(phase)
    verdict = world.run(15.0)
    assert verdict is not None and verdict.phase == phase
    assert 10.0 < verdict.age_s < 12.0


def test_who_has_not_begun_to_make_its_group_keeps_those_waiting_that_have() -> None:
    world = World()
    world.phase("recovery", 2)
    world.phase("group", 0, 1, 3)
    verdict = world.run(60.0)
    assert verdict is not None and verdict.guilty == (2,)
    assert verdict.age_s < world.policy.rebuild_limit_s


def test_an_exonerated_rank_doubles_the_deadline() -> None:
    world = World()
    world.train(1, 20)
    before_s = world.judge.step_deadline_s()
    world.judge.exonerate()
    assert world.judge.step_deadline_s() == 2 * before_s


def test_another_world_size_forgets_what_a_step_takes() -> None:
    world = World()
    world.train(1, 20)
    world.judge.plan_changed(4)
    assert world.judge.step_deadline_s() == 1.0
    world.judge.plan_changed(3)
    assert world.judge.step_deadline_s() == 60.0


@pytest.mark.parametrize(("first_s", "deadline_s"), [(0.2, 60.0), (20.0, 200.0), (90.0, 600.0)])
def test_a_hang_before_enough_steps_are_known_is_found_by_what_the_first_one_took(
    first_s: float, deadline_s: float
) -> None:
    world = World()
    world.run(0.1)
    world.step(1)
    world.collective(0)
    assert world.run(first_s) is None
    world.step(2, took_s=first_s)
    world.collective(0, 0, 1, 3)
    verdict = world.run(650.0)
    assert verdict is not None and verdict.guilty == (2,)
    assert verdict.deadline_s == pytest.approx(deadline_s, rel=0.05)


def test_a_heartbeat_in_a_long_stretch_counts_anew() -> None:
    world = World()
    world.train(1, 20)
    for _ in range(10):
        assert world.run(0.8) is None
        for rank in world.ranks:
            world.set(rank, phase_ns=world.ns, resumed_ns=world.ns)


def test_ranks_that_do_not_wait_for_each_other_get_three_times_as_long() -> None:
    world = World(size=2)
    world.train(1, 20)
    verdict = None
    for number in range(21, 100):
        verdict = verdict or world.run(0.1)
        world.step(number, 0, took_s=0.1)
    assert verdict is not None and verdict.guilty == (1,)
    assert 3.0 < verdict.age_s < 3.3


def test_the_longest_interval_of_each_phase_is_kept() -> None:
    world = World(policy=CAPS)
    world.run(3.0)
    world.train(1, 20)
    world.phase("eval")
    world.run(5.0)
    longest = world.judge.longest_s
    assert longest["init"] == pytest.approx(3.1, abs=0.11)
    assert longest["eval"] == pytest.approx(5.0, abs=0.11)
    assert longest["step"] == pytest.approx(0.1)
    assert world.now_s > START_S


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.floats(0.02, 0.24), min_size=10, max_size=40),
    slow=st.lists(st.tuples(st.sampled_from(["data", "save", "eval"]), st.floats(0.1, 9.0)), max_size=4),
    size=st.integers(1, 5),
)
def test_a_healthy_run_is_never_judged(steps: list[float], slow: list[tuple[str, float]], size: int) -> None:
    """Steps whose times differ by up to 12, and slow phases on one rank for which the others wait."""
    world = World(size=size, policy=CAPS)
    world.run(0.1)
    world.step(1)
    for number, took_s in enumerate(steps, start=2):
        if slow and number % 5 == 0:
            phase, long_s = slow[number // 5 % len(slow)]
            world.phase(phase, 0)
            if size > 1:
                world.collective(0, *range(1, size))
            assert world.run(long_s) is None
            world.phase("step", 0)
            world.collective(0, 0)
        else:
            world.collective(0)
        assert world.run(took_s) is None
        world.step(number, took_s=took_s)
    assert world.verdicts == []


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 6), data=st.data(), step_s=st.floats(0.05, 2.0))
def test_a_single_hung_rank_is_always_found_alone(size: int, data: st.DataObject, step_s: float) -> None:
    world = World(size=size)
    world.train(1, 12, step_s=step_s)
    hung = data.draw(st.integers(0, size - 1))
    world.collective(0, *(r for r in world.ranks if r != hung))
    verdict = world.run(60.0)
    assert verdict is not None and verdict.guilty == (hung,)
    assert verdict.age_s <= max(1.0, 4 * step_s) + 0.2
