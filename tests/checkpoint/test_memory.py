"""Jobs of real ranks that lose a rank, or everything, and go on from memory: at most one step back, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch_job import Job, wait_until
from memory_runs import SAME, loads, notes, run

from ridethrough.checkpoint import layout
from ridethrough.ledger.partition import read_events
from ridethrough.ledger.summary import ledger_summary, read_run

HERE = Path(__file__).parent
pytestmark = pytest.mark.ranks
HANG = {"RIDETHROUGH_FILE_HOOK": "hooks:hang", "RIDETHROUGH_LOAD_HOOK": "hooks:hang"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rank -> step -> note of a run without faults."""
    with Job(tmp_path_factory.mktemp("control")) as job:
        assert job.wait(run(job, "control")) == 0, job.text()
        return [notes(job, "control", rank) for rank in range(2)]


def check_alike(job: Any, name: str, undisturbed: Any, steps: int = 16, start: int = 1) -> None:
    for rank in range(2):
        mine = notes(job, name, rank)
        assert sorted(mine) == list(range(start, steps + 1))
        for step, note in mine.items():
            assert {k: note[k] for k in SAME} == {k: undisturbed[rank][step][k] for k in SAME}, (rank, step)


def check_epochs(job: Any, name: str) -> None:
    """Case A10: of each epoch and loader, every sample once."""
    mine = [notes(job, name, rank) for rank in range(2)]
    for which in range(len(mine[0][1]["ids"])):
        for epoch in (range(1, 9), range(9, 17)):
            seen = [i for rank in mine for step in epoch for i in rank[step]["ids"][which]]
            assert sorted(seen) == list(range(64)), (which, epoch)


@pytest.mark.parametrize("memory", ["auto", pytest.param("off", marks=pytest.mark.campaign)])
def test_a10_a11_no_sample_twice_and_every_random_stream_goes_on(launched: Any, undisturbed: Any, memory: str) -> None:
    """Cases A10 and A11: killed in the middle and exactly at the end of an epoch, with 0 or 2 loader processes,
    persistent or not. Samples, losses, random streams, weights and the scaler are those of an undisturbed run."""
    faults = ("sigkill:1:6:forward", "sigkill:0:8:save", "exception:1:12:backward")
    flags = [word for fault in faults for word in ("--fault-at", fault)]
    assert launched.wait(run(launched, "a", *flags, memory=memory)) == 0, launched.text()
    check_alike(launched, "a", undisturbed)
    check_epochs(launched, "a")
    tiers = loads(launched, "a")
    if memory == "off":
        assert {tier for _step, tier in tiers} == {"fresh", "storage"}
        return
    assert [tier for _step, tier in tiers] == ["fresh", "memory", "memory", "memory"]
    lost = [i["steps_lost"] for i in ledger_summary(read_run(launched.folder / "runs" / "a"))["incidents"]]
    assert len(lost) == 3 and max(lost) <= 1, lost


def test_a_recovery_from_memory_does_not_wait_for_storage_that_hangs(launched: Any, control: Any) -> None:
    hanging = launched.folder / "hanging"
    env = {"HANGING": str(hanging), "PYTHONPATH": str(HERE), **HANG}
    process = run(launched, "h", "--fault-at", "sigkill:1:6:backward", env=env, step_s=0.1, loaders=False)
    wait_until(lambda: notes(launched, "h", 0).get(5), lambda: f"no step 5:\n{launched.text()}")
    hanging.touch()
    wait_until(lambda: notes(launched, "h", 0).get(14), lambda: f"did not go on:\n{launched.text()}")
    hanging.unlink()
    assert launched.wait(process) == 0, launched.text()
    check_alike(launched, "h", control)
    assert loads(launched, "h")[1][1] == "memory"
    committed = [a.step for a in layout.scan(launched.folder / "ckpt-h") if a.state == "committed"]
    assert max(committed) == 16


def test_without_a_copy_in_memory_a_load_waits_its_limit_and_ends_with_a_code(launched: Any) -> None:
    hanging = launched.folder / "hanging"
    env = {"HANGING": str(hanging), "PYTHONPATH": str(HERE), **HANG}
    more = {"memory": "off", "every": 100, "step_s": 0.2, "storage_timeout_s": 0.5, "loaders": False}
    process = run(launched, "h", "--fault-at", "exception:1:6:backward", env=env, **more)
    wait_until(lambda: notes(launched, "h", 0).get(4), lambda: f"no step 4:\n{launched.text()}")
    hanging.touch()
    assert launched.wait(process) == 81, launched.text()
    assert "storage did not answer within 0.5 s" in launched.text()


@pytest.mark.campaign
def test_a_stop_saves_the_newest_state_in_memory_though_the_ranks_are_stuck(launched: Any, control: Any) -> None:
    """Rule of a preemption: the keepers need no rank."""
    flags = ("--observe", "--stop-grace", "3", "--fault-at", "hang:1:6:forward")
    process = run(launched, "s", *flags, every=None, loaders=False)
    wait_until(lambda: notes(launched, "s", 0).get(5), lambda: f"no step 5:\n{launched.text()}")
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert launched.wait(process) == 82, launched.text()
    assert time.monotonic() - began < 20
    (found,) = [a for a in layout.scan(launched.folder / "ckpt-s") if a.state == "committed"]
    assert found.step == 5
    shutil.rmtree(launched.folder / "s")
    assert launched.wait(run(launched, "s", "--run-id", "s2", every=None, loaders=False)) == 0
    assert loads(launched, "s2") == [(5, "storage")]
    check_alike(launched, "s", control, start=6)


def test_a_state_that_is_not_finite_or_behind_a_loss_spike_is_never_gone_back_to(launched: Any) -> None:
    """Poison: weights are not finite from step 5 on, and the exception in 8 takes the job back to 4; then the losses of
    14 and 15 are a thousand times the usual, and that in 16 takes it back to 13. The storage here is too slow for the
    keeper's grace, which is the job's."""
    flags = ("--fault-at", "exception:0:8:forward", "--fault-at", "exception:0:16:forward", "--stop-grace", "0.25")
    more = {"nan_at": 5, "spike_at": 14, "spike_factor": 20.0, "every": 6, "loaders": False, "steps": 18}
    env = {"RIDETHROUGH_FILE_HOOK": "hooks:slow", "SLOW_S": "0.3", "PYTHONPATH": str(HERE)}
    assert launched.wait(run(launched, "p", *flags, env=env, **more)) == 0, launched.text()
    assert loads(launched, "p") == [(0, "fresh"), (4, "memory"), (13, "memory")]
    bad = [a for a in layout.scan(launched.folder / "ckpt-p") if a.step == 6 and ".g1." in a.attempt]
    assert all(a.state != "committed" for a in bad)
    assert "nan" not in notes(launched, "p", 0)[18]["loss"]
    assert "a keeper that is told to stop has 0.25 s" in launched.text()


def test_a_state_that_fails_again_is_passed_over_for_an_older_one(launched: Any, control: Any) -> None:
    """Step 10 fails twice: from what memory holds, and from that again. Then storage's newest before it is taken."""
    assert launched.wait(run(launched, "o", raise_at=10, loaders=False)) == 0, launched.text()
    assert loads(launched, "o") == [(0, "fresh"), (9, "memory"), (8, "storage")]
    check_alike(launched, "o", control)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10, id="tenth", marks=pytest.mark.timeout(300)),
        pytest.param(100, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)]),
    ],
)
def test_every_fault_costs_at_most_one_step_and_the_end_is_the_same(launched: Any, control: Any, count: int) -> None:
    """Exceptions, hangs and SIGKILL on any rank in any phase, drawn with a seed, one after the other."""
    chance = random.Random(11)
    steps = 4 * count + 6
    phases = ("data", "forward", "backward", "optimizer", "save")
    flags: list[str] = []
    for number in range(count):
        kind = ("sigkill", "exception", "hang", "sigkill", "exception")[number % 5]
        phase = chance.choice(phases[1:4] if kind == "hang" else phases)  # data and saves may take their time
        fault = f"{kind}:{chance.randrange(2)}:{4 * number + chance.randrange(3, 6)}:{phase}"
        flags += ["--fault-at", fault]
    policy = launched.folder / "policy.json"
    budgets = ("max_restarts", "max_rank_faults", "max_cheap_in_window", "max_costly_in_window")
    policy.write_text(json.dumps(dict.fromkeys(budgets, 1000)))
    flags += ["--policy", str(policy), "--fault-steps", str(steps)]
    more = {"steps": steps, "loaders": False, "every": 50}
    if steps not in control[0]:
        assert launched.wait(run(launched, "control", **more), 600) == 0, launched.text()
        control = [notes(launched, "control", rank) for rank in range(2)]
    assert launched.wait(run(launched, "f", *flags, **more), 3000) == 0, launched.text()
    check_alike(launched, "f", control, steps)
    incidents = ledger_summary(read_run(launched.folder / "runs" / "f"))["incidents"]
    fired = [e for e in read_events(launched.folder / "runs" / "f") if e["kind"] == "fault_injected"]
    assert len(fired) == count
    assert {i["steps_lost"] for i in incidents} <= {0, 1}, [(i["id"], i["steps_lost"], i["phase"]) for i in incidents]
    tiers = loads(launched, "f")
    assert {tier for _step, tier in tiers[1:]} == {"memory"}
