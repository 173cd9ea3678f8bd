"""The published reference's schedule of faults: 2,000 steps, 5 exceptions and hangs drawn with seed 42 and weights 0.6
and 0.4, a checkpoint every 500 steps; with the memory tier and without it."""

from __future__ import annotations

from typing import Any

import pytest
from memory_runs import loads, run

from ridethrough.ledger.summary import ledger_summary, read_run

STEPS = 2000
FLAGS = ("--fault-count", "5", "--fault-seed", "42", "--fault-steps", str(STEPS))
TYPES = ("--fault-types", "exception,hang", "--fault-type-weights", "0.6,0.4")


@pytest.mark.campaign
@pytest.mark.ranks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("memory", "goodput"), [("auto", 0.95), ("off", None)])
def test_training_goodput_of_the_references_schedule(launched: Any, memory: str, goodput: float | None) -> None:
    """At a tenth of the reference's step of 0.5 s. What the faults cost does not depend on the step's length, but for
    the steps done again, so the same run at 0.5 s is reckoned from it; both are printed."""
    more = {"steps": STEPS, "step_s": 0.05, "every": 500, "memory": memory, "loaders": False}
    assert launched.wait(run(launched, "g", *FLAGS, *TYPES, **more), 600) == 0, launched.text()
    found = ledger_summary(read_run(launched.folder / "runs" / "g"))
    lost = [incident["steps_lost"] for incident in found["incidents"]]
    measured = found["training_goodput"]
    overhead_s = found["ledger"]["wall_ns"] / 1e9 * (1 - measured) - sum(lost) * 0.05
    reckoned = STEPS * 0.5 / (STEPS * 0.5 + overhead_s + sum(lost) * 0.5)
    print(f"memory={memory}: goodput {measured:.4f} at 0.05 s, {reckoned:.4f} at 0.5 s, steps lost {lost}")
    assert len(lost) == 5
    if goodput is not None:
        assert max(lost) <= 1 and {tier for _step, tier in loads(launched, "g")[1:]} == {"memory"}
        assert reckoned >= goodput
