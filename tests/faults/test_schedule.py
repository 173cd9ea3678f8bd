"""The schedule is a pure function: same arguments, same faults, same hash; bad arguments get one line."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.faults.kinds import HANG_VARIANTS, KINDS
from ridethrough.faults.phases import PHASES, RECOVERY_PHASES
from ridethrough.faults.schedule import FIRST_STEP, Fault, Schedule, ScheduleError, by_hand, plan

TYPES = ("exception", "hang", "sigkill")


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, object]:
    types = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True))
    steps = draw(st.integers(2, 400))
    world_size = draw(st.integers(1, 64))
    at_once = draw(st.integers(1, min(3, world_size)))
    phases = draw(st.none() | st.lists(st.sampled_from(PHASES), min_size=1, unique=True).map(lambda p: [*p, "forward"]))
    return {
        "seed": draw(st.integers(-(2**63), 2**63)),
        "count": draw(st.integers(0, min(40, (steps - 1) * at_once))),
        "types": types,
        "weights": draw(st.none() | st.lists(st.floats(0.01, 5), min_size=len(types), max_size=len(types))),
        "steps": steps,
        "world_size": world_size,
        "phases": phases,
        "at_once": at_once,
    }


@settings(max_examples=150, deadline=None)
@given(arguments())
def test_any_plan_is_exact_repeatable_and_in_range(args: dict) -> None:  # type: ignore[type-arg]
    schedule = plan(**args)
    again = plan(**args)
    assert schedule == again and schedule.hash == again.hash
    faults = schedule.faults
    assert len(faults) == args["count"]
    assert [f.step for f in faults] == sorted(f.step for f in faults)
    assert all(FIRST_STEP <= f.step <= args["steps"] and 0 <= f.rank < args["world_size"] for f in faults)
    assert {f.kind for f in faults} <= set(args["types"])
    assert len({f.id for f in faults}) == len(faults)
    per_step = Counter(f.step for f in faults)
    assert all(n <= args["at_once"] for n in per_step.values())
    assert len({(f.step, f.rank) for f in faults}) == len(faults)
    for i, fault in enumerate(faults):
        if fault.phase in RECOVERY_PHASES:
            later = [f for f in faults[i:] if f.phase not in RECOVERY_PHASES and KINDS[f.kind].ends_generation]
            assert later, "no recovery would ever come for this fault"


def test_golden_schedule_and_hash() -> None:
    """Changing how faults are drawn makes old results incomparable: this value must change only on purpose."""
    schedule = plan(42, 5, TYPES, (0.4, 0.3, 0.3), steps=200, world_size=4)
    assert schedule.hash == "ab2beda6ed4589b3"
    assert [(f.id, f.step, f.rank, f.phase, f.kind, f.args) for f in schedule.faults] == [
        ("f01", 10, 1, "backward", "sigkill", {}),
        ("f02", 59, 2, "optimizer", "sigkill", {}),
        ("f03", 74, 2, "backward", "hang", {"variant": "hang_loop"}),
        ("f04", 81, 0, "optimizer", "hang", {"variant": "hang_lock"}),
        ("f05", 136, 1, "backward", "exception", {}),
    ]


def test_every_argument_counts_in_the_hash() -> None:
    base = {"seed": 42, "count": 5, "types": TYPES, "weights": (4, 3, 3), "steps": 200, "world_size": 4}
    changes = [{}, {"seed": 43}, {"count": 4}, {"types": TYPES[::-1]}, {"weights": (3, 4, 4)}, {"steps": 100}]
    changes += [{"world_size": 8}, {"phases": ("data", "save", "eval", "forward")}, {"at_once": 2}]
    hashes = [plan(**{**base, **change}).hash for change in changes]  # type: ignore[arg-type]
    assert len(set(hashes)) == len(changes)
    assert plan(**{**base, "weights": (0.4, 0.3, 0.3)}).hash == hashes[0]  # only the proportion of weights matters


def test_weights_ranks_and_hang_variants_come_out_as_asked() -> None:
    faults = plan(7, 4000, TYPES, (0.5, 0.3, 0.2), steps=5000, world_size=4).faults
    kinds = Counter(f.kind for f in faults)
    assert kinds["exception"] == pytest.approx(2000, abs=120)
    assert kinds["hang"] == pytest.approx(1200, abs=120)
    ranks = Counter(f.rank for f in faults)
    assert set(ranks) == {0, 1, 2, 3} and min(ranks.values()) > 850
    variants = Counter(f.args["variant"] for f in faults if f.kind == "hang")
    assert set(variants) == set(HANG_VARIANTS) and min(variants.values()) > 330
    assert {f.kind for f in plan(7, 300, TYPES, (1, 0, 1), steps=500, world_size=4).faults} == {"exception", "sigkill"}


def test_all_steps_can_be_asked_for_but_no_more() -> None:
    assert [f.step for f in plan(1, 9, ["exit"], None, steps=10, world_size=2).faults] == list(range(2, 11))
    with pytest.raises(ScheduleError, match=r"10 faults do not fit into 10 steps.*at most 9 faults"):
        plan(1, 10, ["exit"], None, steps=10, world_size=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"types": ["exception", "flood"]}, "unknown fault kind 'flood': choose among corrupt_save, cut_network, "),
        ({"weights": [0.5, 0.5]}, r"2 weights for 1 fault types \(exception\)"),
        ({"weights": [0.0]}, "give numbers >= 0 of which one is above 0"),
        ({"weights": [float("nan")]}, "fault weights nan"),
        ({"weights": [-1.0]}, "fault weights -1.0"),
        ({"types": ["exception", "exception"]}, "named twice"),
        ({"types": []}, "no fault types"),
        ({"phases": ["forward", "lunch"]}, "unknown phase 'lunch': choose among step, data, forward"),
        ({"phases": ["init", "recovery"]}, "come only with a recovery"),
        ({"count": -1}, "give a count >= 0"),
        ({"at_once": 5}, "5 faults at once on 4 ranks"),
    ],
)
def test_bad_arguments_get_one_line_with_the_remedy(change: dict, says: str) -> None:  # type: ignore[type-arg]
    args = {"seed": 1, "count": 2, "types": ["exception"], "weights": None, "steps": 20, "world_size": 4}
    with pytest.raises(ScheduleError, match=says) as error:
        plan(**{**args, **change})
    assert "\n" not in str(error.value)


def test_by_hand_reads_entries_and_counts_negative_ranks_from_the_end() -> None:
    schedule = by_hand(["hang:0:12", "exception:-1:7:backward"], steps=20, world_size=4)
    assert schedule.faults[0] == Fault("f02", 7, 3, "backward", "exception")
    assert (schedule.faults[1].step, schedule.faults[1].phase) == (12, "forward")
    assert schedule.faults[1].args["variant"] in HANG_VARIANTS
    assert schedule == by_hand(["hang:0:12", "exception:-1:7:backward"], steps=20, world_size=4)
    for entry in ("exception", "exception:a:7", "exception:4:7", "exception:0:21", "exception:0:7:forward:x"):
        with pytest.raises(ScheduleError, match=re.escape(repr(entry))):
            by_hand([entry], steps=20, world_size=4)


def test_saved_schedules_come_back_and_edited_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    schedule = plan(7, 3, ["hang", "exit"], None, steps=50, world_size=4)
    schedule.save(path)
    assert Schedule.load(path) == schedule
    assert path.stat().st_mode & 0o777 == 0o600
    content = json.loads(path.read_text())
    assert list(content) == ["hash", "seed", "faults"]
    assert list(content["faults"][0]) == ["id", "step", "rank", "phase", "kind", "args"]
    content["faults"][0]["rank"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ScheduleError, match="it was edited"):
        Schedule.load(path)
    path.write_text("{}")
    with pytest.raises(ScheduleError, match="not a fault schedule"):
        Schedule.load(path)
    with pytest.raises(ScheduleError, match="cannot be read"):
        Schedule.load(tmp_path / "none.json")


def test_ids_are_safe_as_file_names() -> None:
    for bad in ("../x", "", "a/b"):
        with pytest.raises(ScheduleError, match="unique words"):
            from ridethrough.faults.schedule import check

            check([Fault(bad, 3, 0, "forward", "exit", {"code": 1})])
