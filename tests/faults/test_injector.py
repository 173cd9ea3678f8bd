"""The injector against a stand-in Run: where faults fire, that they fire once, and that no plan costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridethrough.faults import injector
from ridethrough.faults.kinds import KINDS
from ridethrough.faults.schedule import Fault, Schedule, ScheduleError, by_hand, plan
from ridethrough.faults.shot import SCHEDULE_VARIABLE, FaultRefused, InjectedFault

STANDIN = Path(__file__).with_name("standin.py")


class Recording:
    """A Run that notes what it is asked."""

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.records: list[dict[str, Any]] = []
        self.callbacks: list[Any] = []

    def record(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    def observe(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def enter(self, phase: str, step: int) -> None:
        for callback in self.callbacks:
            callback(phase, step)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """planned(entries): writes the schedule and names it in the environment."""
    monkeypatch.setattr(injector, "_last_step", 0)

    def write(*entries: str) -> Schedule:
        schedule = by_hand(entries, steps=1000, world_size=4)
        schedule.save(tmp_path / "faults.json")
        monkeypatch.setenv(SCHEDULE_VARIABLE, str(tmp_path / "faults.json"))
        return schedule

    return write


def test_fires_at_its_phase_of_its_step_on_its_rank_only(planned: Any, tmp_path: Path) -> None:
    planned("exception:1:7:backward")
    other, run = Recording(tmp_path, 0), Recording(tmp_path, 1)
    injector.install(other)
    injector.install(run)
    assert other.callbacks == []
    for step in range(1, 7):
        for phase in ("step", "forward", "backward"):
            run.enter(phase, step)
    run.enter("step", 7)
    run.enter("forward", 7)
    assert run.records == [] and not (tmp_path / "fired").exists()
    with pytest.raises(InjectedFault, match=r"fault f01 \(exception\) on rank 1, step 7, phase backward"):
        run.enter("backward", 7)
    assert run.records == [
        {"kind": "fault_injected", "id": "f01", "fault_kind": "exception", "phase": "backward", "step": 7}
    ]
    assert (tmp_path / "fired" / "f01").stat().st_mode & 0o777 == 0o600


def test_does_not_fire_again_after_a_restart(planned: Any, tmp_path: Path) -> None:
    planned("exception:1:7:backward")
    for generation in range(3):
        run = Recording(tmp_path, 1)
        injector.install(run)
        if generation == 0:
            with pytest.raises(InjectedFault):
                run.enter("backward", 7)
        else:
            assert run.callbacks == []
    (tmp_path / "fired" / "f01").unlink()
    late = Recording(tmp_path, 1)
    injector.install(late)
    (tmp_path / "fired" / "f01").touch()  # another process claims it after this one armed it
    late.enter("backward", 7)
    assert late.records == []


def test_a_phase_that_the_script_does_not_mark_fires_at_the_next_step(planned: Any, tmp_path: Path) -> None:
    planned("exception:1:7:optimizer")
    run = Recording(tmp_path, 1)
    injector.install(run)
    run.enter("step", 7)
    with pytest.raises(InjectedFault):
        run.enter("step", 8)


def test_save_and_eval_fire_at_the_first_one_from_their_step_on(planned: Any, tmp_path: Path) -> None:
    planned("exception:1:7:save", "exception:1:7:eval")
    run = Recording(tmp_path, 1)
    injector.install(run)
    run.enter("save", 5)
    run.enter("step", 8)
    with pytest.raises(InjectedFault, match="phase eval"):
        run.enter("eval", 10)
    with pytest.raises(InjectedFault, match="phase save"):
        run.enter("save", 10)


@pytest.mark.parametrize(
    ("phase", "enter"), [("recovery", "recovery"), ("init", "init"), ("load", "load"), ("first_step", "step")]
)
def test_recovery_phases_fire_in_the_recovery_from_a_fault_at_or_after_their_step(
    planned: Any, tmp_path: Path, phase: str, enter: str
) -> None:
    planned(f"exception:1:7:{phase}", "exception:0:9:forward")
    first = Recording(tmp_path, 1)
    injector.install(first)
    first.enter("init", 0)
    first.enter("load", 0)
    first.enter("step", 1)
    assert first.records == []
    zero = Recording(tmp_path, 0)
    injector.install(zero)
    with pytest.raises(InjectedFault):
        zero.enter("forward", 9)
    injector._last_step = 0  # as in a process that took the rank over
    second = Recording(tmp_path, 1)
    injector.install(second)
    with pytest.raises(InjectedFault):
        second.enter(enter, 1)


def test_slow_lasts_its_steps_and_no_longer(planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("ridethrough.faults.hangs.sleep_s", naps.append)
    planned("slow:1:7:step")
    run = Recording(tmp_path, 1)
    injector.install(run)
    counts = []
    for step in range(1, 25):
        run.enter("step", step)
        run.enter("forward", step)
        counts.append(len(naps))
    assert counts == [0] * 6 + list(range(1, 11)) + [10] * 8
    assert set(naps) == {0.5}


def test_no_plan_observes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recording(tmp_path, 0)
    monkeypatch.delenv(SCHEDULE_VARIABLE, raising=False)
    injector.install(run)
    Schedule(1, ()).save(tmp_path / "faults.json")
    monkeypatch.setenv(SCHEDULE_VARIABLE, str(tmp_path / "faults.json"))
    injector.install(run)
    assert run.callbacks == [] and run.records == []


def test_a_missing_schedule_is_an_error_not_a_quiet_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE_VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(ScheduleError, match="cannot be read"):
        injector.install(Recording(tmp_path, 0))


def test_oom_is_refused_before_it_could_take_the_machine(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned("oom:1:7")
    monkeypatch.setattr("ridethrough.faults.deaths.memory_limit_bytes", lambda: None)
    with pytest.raises(FaultRefused, match="no memory cgroup limit"):
        injector.install(Recording(tmp_path, 1))
    monkeypatch.setattr("ridethrough.faults.deaths.memory_limit_bytes", lambda: 1 << 28)
    injector.install(Recording(tmp_path, 1))


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        pytest.param(
            "device_assert", "no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
        ),
        pytest.param(
            "illegal_access", "no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
        ),
        ("node_loss", "this job has one node"),
        ("cut_network", "no network of its own"),
        ("slow_storage", "RIDETHROUGH_FILE_HOOK"),
        ("full_storage", "RIDETHROUGH_FILE_HOOK"),
    ],
)
def test_a_kind_that_lacks_what_it_needs_is_refused_before_the_first_step(
    planned: Any, tmp_path: Path, kind: str, needs: str
) -> None:
    planned(f"{kind}:1:7")
    with pytest.raises(FaultRefused, match=needs):
        injector.install(Recording(tmp_path, 1))


def test_memory_pressure_takes_no_more_than_half_of_what_is_free() -> None:
    with pytest.raises(FaultRefused, match="more than half"):
        KINDS["memory_pressure"].guard({"mib": 1 << 30, "num_steps": 1})


def test_each_fault_fires_once_across_two_processes_that_race_for_it(tmp_path: Path) -> None:
    """Two processes hold the same rank, as when a lost node's rank was handed out while it still ran."""
    schedule = Schedule(5, tuple(Fault(f"f{i:02d}", 2 + i, 0, "forward", "exception") for i in range(8)))
    schedule.save(tmp_path / "faults.json")
    logs = _standins(tmp_path, [(0, 40), (0, 40)])
    fired = sorted(line["id"] for line in logs if line.get("event") == "fault_injected")
    assert fired == [fault.id for fault in schedule.faults]
    assert len([line for line in logs if line.get("left") == "exception"]) == 8
    assert len([line for line in logs if "finished" in line]) == 2


def test_same_seed_same_log_twice_and_another_seed_another(tmp_path: Path) -> None:
    def log(name: str, seed: int) -> list[tuple[int, int, str]]:
        run_dir = tmp_path / name
        run_dir.mkdir()
        schedule = plan(seed, 6, ["exception"], None, steps=60, world_size=2, phases=["forward", "save", "eval"])
        schedule.save(run_dir / "faults.json")
        lines = _standins(run_dir, [(0, 200), (1, 200)])
        events = [line for line in lines if line.get("event") == "fault_injected"]
        assert len(events) == 6
        planned = {fault.id: fault for fault in schedule.faults}
        return sorted((planned[e["id"]].step, e["rank"], e["fault_kind"]) for e in events)

    assert log("a", 7) == log("b", 7)
    assert log("c", 7) != log("d", 8)


def _standins(run_dir: Path, workers: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Run stand-in workers (rank, steps) side by side; all their lines."""
    started = [
        subprocess.Popen(
            [sys.executable, str(STANDIN), str(run_dir), str(rank), str(steps)],
            env={"PATH": "/usr/bin:/bin", SCHEDULE_VARIABLE: str(run_dir / "faults.json")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, steps in workers
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(workers)
    return [json.loads(line) for output in outputs for line in output.splitlines()]
