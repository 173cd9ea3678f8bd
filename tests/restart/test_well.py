"""Which health checks take a process out, which the node, and which are only reported: as the policy says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ridethrough.generation.policy import Policy
from ridethrough.health import checks
from ridethrough.restart.well import Unfit, Wellness

SICK = "check user failed: the licence server is gone"


def look(wellness: Wellness, policy: Policy, why: str = "") -> tuple[Unfit | None, dict[str, str]]:
    """What is to be replaced, and the status of each check as it was recorded."""
    recorded: dict[str, str] = {}

    def record(kind: str, **fields: Any) -> None:
        assert kind == "health"
        recorded[fields["check"]] = fields["status"]

    return wellness.look(record, policy, why), recorded


@pytest.mark.parametrize(
    ("policy", "unfit"),
    [
        (Policy(), Unfit(SICK, node=False)),
        (Policy(evict_on=("user",)), Unfit(SICK, node=True)),
        (Policy(replace_process_on=()), None),
    ],
)
def test_a_users_own_check_does_what_the_policy_says(tmp_path: Path, policy: Policy, unfit: Unfit | None) -> None:
    wellness = Wellness(tmp_path, lambda: "the licence server is gone")
    found, recorded = look(wellness, policy)
    assert found == unfit
    assert recorded["user"] == "FAIL" and recorded["disk"] == "PASS"


def test_a_disk_that_is_gone_is_reported_and_takes_nobody_out(tmp_path: Path) -> None:
    wellness = Wellness(tmp_path / "gone", lambda: True)
    found, recorded = look(wellness, Policy())
    assert found is None
    assert recorded["user"] == "PASS" and recorded["disk"] == "FAIL"
    found, _ = look(wellness, Policy(replace_process_on=("disk",)))
    assert found is not None and not found.node and found.why.startswith("check disk failed: ")


def test_a_link_that_goes_down_takes_the_node_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_NET", tmp_path)
    monkeypatch.setattr(checks, "_INFINIBAND", tmp_path / "none")
    (tmp_path / "eth0" / "device").mkdir(parents=True)
    (tmp_path / "eth0" / "operstate").write_text("up\n")
    wellness = Wellness(None, None)
    assert look(wellness, Policy())[0] is None
    (tmp_path / "eth0" / "operstate").write_text("down\n")
    assert look(wellness, Policy())[0] == Unfit("check nic failed: down: eth0", node=True)
    assert look(wellness, Policy(evict_on=("ecc",)))[0] is None


def test_what_broke_the_process_does_not_hide_a_broken_node(tmp_path: Path) -> None:
    policy = Policy(evict_on=("user",))
    assert look(Wellness(tmp_path, lambda: True), policy, "CUDA failed")[0] == Unfit("CUDA failed", node=False)
    found, _ = look(Wellness(tmp_path, lambda: "the licence server is gone"), policy, "CUDA failed")
    assert found == Unfit(f"CUDA failed; {SICK}", node=True)


def test_a_check_has_as_long_as_the_policy_gives_it(tmp_path: Path) -> None:
    asked = threading.Event()
    wellness = Wellness(tmp_path, lambda: asked.wait(30.0))
    found, _ = look(wellness, Policy(gate_limit_s=0.05))
    assert found == Unfit("check user failed: did not end within 0.05 s", node=False)
    threading.Timer(0.2, asked.set).start()
    assert look(wellness, Policy(gate_limit_s=30.0))[0] is None
