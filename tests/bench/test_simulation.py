"""The simulation against cases that are worked out by hand, and the product's rules in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ridethrough.bench.simulation import simulate
from ridethrough.bench.simulation_assumptions import FLEETS, assumptions
from ridethrough.bench.simulation_cases import best_interval, contradictions, published_faults
from ridethrough.bench.simulation_model import (
    Fleet,
    Mechanism,
    Planned,
    Saving,
    Times,
    from_json,
)
from ridethrough.bench.simulation_saver import Saver

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
NO_SAVES = Saving("none")


def test_the_ledgers_worked_case() -> None:
    """10 steps of 1 s, a save at 4 that stalls nothing, a crash half into step 8, 5 s to the resumed step's start."""
    times = Times(1.0, rebuild_s={"all": 5.0})
    mechanism = Mechanism("worked", times, Saving("supersede", 4, 0.0))
    found = simulate(
        Fleet(1, gpus_per_node=1, total_steps=10), mechanism, planned=[Planned(8, "exception", into_s=0.5)]
    )
    assert found.wall_s == pytest.approx(18.5)
    assert found.training_goodput == pytest.approx(10 / 18.5)
    assert found.states_s == pytest.approx({"step": 10.0, "lost_step": 3.0, "partial_step": 0.5, "rebuild": 5.0})


def test_the_machine_replaces_only_what_died() -> None:
    times = Times(1.0, rebuild_s={"in_process": 1.0, "replace_process": 3.0, "replace_node": 10.0})
    mechanism = Mechanism("ours", times, Saving("supersede", 100, 1.0, memory_every=1), rungs=True)
    fleet = Fleet(16, total_steps=40, num_spares=1)

    def first_step(kind: str) -> float:
        found = simulate(fleet, mechanism, planned=[Planned(20, kind)])
        assert found.ended == "done" and found.steps_lost <= 1 and found.first_step_s is not None
        return found.first_step_s["max"]

    assert first_step("exception") == pytest.approx(2.0)
    assert first_step("sigkill") == pytest.approx(4.0)
    assert first_step("node_loss") == pytest.approx(11.0, abs=0.5)


def test_without_a_spare_a_lost_node_waits_for_its_repair_and_then_gives_up() -> None:
    times = Times(1.0, rebuild_s={"in_process": 1.0, "all": 1.0})
    ours = Mechanism("ours", times, NO_SAVES, rungs=True)
    fleet = Fleet(16, total_steps=40, repair_s=1000.0)
    assert simulate(fleet, ours, planned=[Planned(20, "node_loss")]).states_s["rebuild"] == pytest.approx(1001, abs=31)
    assert simulate(fleet, replace(ours, rungs=False), planned=[Planned(20, "node_loss")]).wall_s > 1000


def test_pods_wait_by_the_kubelets_rules() -> None:
    """Saves at every step; three failures in a row: at once, then 10 s, then 20 s."""
    mechanism = Mechanism("pods", Times(1.0, rebuild_s={"all": 2.0}), Saving("sync", 1, 0.0), pods=True)
    planned = [Planned(step, "exception") for step in (5, 6, 7)]
    found = simulate(Fleet(8, total_steps=10), mechanism, planned=planned)
    assert found.states_s["rebuild"] == pytest.approx(3 * 2 + 10 + 20)


def test_how_saves_hold_up_training() -> None:
    """A step of 1 s, a save every 10 that takes 25 s: blocking waits 25 s, asynchronous the rest of the one before, and
    one that supersedes nothing at all."""
    fleet, times = Fleet(1, total_steps=40), Times(1.0)

    def stalled(mode: str) -> float:
        return simulate(fleet, Mechanism("m", times, Saving(mode, 10, 25.0))).states_s.get("snapshot_stall", 0.0)

    assert stalled("sync") == pytest.approx(75.0), "the last one is part of the finish"
    assert stalled("wait") == pytest.approx(30.0)
    assert stalled("supersede") == 0.0


def test_what_a_recovery_finds() -> None:
    saver = Saver(Saving("supersede", 10, 5.0, memory_every=1, replica_lag=2))
    saver.boundary(10, 10.0)
    assert saver.at_fault(13, 13.0, "exception", True) == 13
    assert saver.at_fault(13, 13.0, "node_loss", False) == 11
    durable = Saver(Saving("supersede", 10, 5.0))
    durable.boundary(10, 10.0)
    assert durable.at_fault(13, 13.0, "sigkill", False) == 0, "what the dead process was writing is lost"
    durable.boundary(20, 20.0)
    assert durable.at_fault(23, 25.0, "sigkill", True) == 20


def test_drawn_failures_are_those_of_the_seed_and_states_sum_to_the_wall() -> None:
    rates = {"exception": 0.5, "node_loss": 0.2}
    fleet = Fleet(16, rates=rates, num_spares=4, repair_s=60.0, horizon_s=4 * 3600.0)
    times = Times(2.0, rebuild_s={"in_process": 1.0, "replace_node": 5.0})
    mechanism = Mechanism("ours", times, Saving("supersede", 10, 4.0, memory_every=1), rungs=True)
    one, again, other = (simulate(fleet, mechanism, seed) for seed in (7, 7, 8))
    assert one == again and one != other
    assert sum(one.states_s.values()) == pytest.approx(one.wall_s)
    assert 20 < sum(one.num_failures.values()) < 80, "45 are to be expected"


def test_every_mechanism_meets_the_same_failures_and_the_best_interval_is_near_youngs() -> None:
    """Steps of 5 s, a save that blocks for 10 s, a failure every 1,125 s: Young says 150 s between two saves."""
    rates = {"exception": 0.15, "sigkill": 0.05}
    fleet = Fleet(16, rates=rates, horizon_s=2 * 86_400.0)
    anew = Mechanism("anew", Times(5.0, rebuild_s={"all": 5.0}), Saving("sync", 1, 10.0))
    ours = Mechanism(
        "ours", Times(5.0, rebuild_s={"in_process": 1.0, "replace_process": 2.0}), Saving(interval=9), rungs=True
    )
    best, about = best_interval(fleet, anew, seed=3)
    assert about["young_steps"] == 30 and about["daly_steps"] == 29
    assert 15 <= about["interval"] <= 60, about
    assert best.num_failures == simulate(fleet, ours, seed=3).num_failures


def test_every_assumption_says_where_it_is_from() -> None:
    sources = [value["source"] for values in assumptions().values() for value in values.values()]
    assert len(sources) > 30
    assert all(re.match("published|measured|assumed|derived|the product's", source) for source in sources)
    published = json.loads((DOCS / "simulation.json").read_text(encoding="utf-8"))
    assert published["assumptions"] == assumptions(), "`ridethrough simulate --json docs/benchmarks/simulation.json`"
    assert FLEETS[1].step_s == pytest.approx(5.93, abs=0.01)  # Llama 3 405B on 16,384 H100


def test_the_published_figures_contradict_themselves() -> None:
    first = contradictions()[0]["values"]
    assert [round(row["step_s"], 3) for row in first] == [0.06, 0.077, 0.121]
    assert len(published_faults()) == 5 and {fault.kind for fault in published_faults()} <= {"exception", "hang"}


def test_a_case_from_a_file_says_what_is_wrong() -> None:
    case = {"fleet": {"num_gpus": 8}, "mechanism": {"name": "m", "times": {"step_s": 1.0}, "saving": {}}}
    with pytest.raises(ValueError, match="no end"):
        from_json(case)
    with pytest.raises(ValueError, match="classes are"):
        from_json({**case, "fleet": {"num_gpus": 8, "total_steps": 5, "rates": {"rain": 1.0}}})
