"""Settings of the policy that no other test names: each one flipped changes what happens. And each one is read."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_scenarios import Job, snapshots

from ridethrough.generation import messages as m
from ridethrough.generation.decision import decide
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.history import History
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.policy import Policy

SOURCE = Path(__file__).parents[2] / "src" / "ridethrough"


def third_rung(**policy: Any) -> str:
    """Of three incidents with the same rank as root, no step between, and a standby node."""
    history, rung = History(), ""
    for cause in "abc":
        given = {"generation": 1, "worker": "w", "rank": 1, "node": "n", "step": 7, "cause": cause}
        root = FaultReport(**given, fault_class="exception", detected_by="exception")
        rung = decide(Policy(**policy), history, root, now_s=0.0, replaced=False, can_replace_node=True).rung
    return rung


def cordoned(**policy: Any) -> list[str]:
    """After a host was lost twice within 100 s."""
    job = Job("a", **policy).running()
    job(m.NodeLeft(node="a", lost=True))
    job.join("b", "host-a")
    job(m.NodeLeft(node="b", lost=True), after_s=100.0)
    return job.machine.history.cordoned


def waits_for_reports(**policy: Any) -> bool:
    """Whether a process that dies on its way is replaced only once its peers had time to report."""
    job = Job(**policy).running()
    job.exited("w0-1")
    job.ready("w0-2")
    job.open_store()
    return not any("spawn" in said for said in job.exited("w0-3"))


def phase_after_ten_seconds(**policy: Any) -> str:
    """Of a coordinator that was started again and has heard one of its two nodes."""
    job = Job("", **policy)
    job.machine = GenerationMachine(
        num_workers=1, min_nodes=2, max_nodes=2, policy=Policy(**policy), epoch=1, earlier=4
    )
    job(snapshots("inside", "inside")[0])
    job.tick(10.0)
    return job.machine.phase


@pytest.mark.parametrize(
    ("effect", "name", "low", "high", "what"),
    [
        (third_rung, "replace_node_after", 2, 4, ("replace_node", "replace_process")),
        (cordoned, "cordon_window_s", 50.0, 500.0, ([], ["host-a"])),
        (waits_for_reports, "decide_after_s", 0.0, 5.0, (False, True)),
        (phase_after_ten_seconds, "learn_limit_s", 5.0, 50.0, ("leaving", "learning")),
    ],
)
def test_a_setting_changes_what_happens(
    effect: Callable[..., Any], name: str, low: float, high: float, what: tuple[Any, Any]
) -> None:
    assert (effect(**{name: low}), effect(**{name: high})) == what


def test_each_setting_is_read_somewhere_outside_of_the_table() -> None:
    """As an attribute of something: `policy.hang_factor`. Growing limits are read through their methods."""
    through = {"leave_limit_s": "leave_limit", "rebuild_limit_s": "rebuild_limit"}
    read = set()
    for path in SOURCE.rglob("*.py"):
        if path.parts[-2:] not in (("generation", "policy.py"), ("generation", "limits.py")):
            read |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert {name for name in Policy.model_fields if through.get(name, name) not in read} == set()
