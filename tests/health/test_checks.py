"""Health checks: their limits, what fails them, and what a missing library says."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from ridethrough.health import checks
from ridethrough.health.gpu import gpu_baseline, gpu_checks


def status(name: str, check: checks.Check, limit_s: float = 1.0) -> tuple[str, str]:
    (outcome,) = checks.run_checks({name: check}, limit_s)
    return outcome.status, outcome.detail


def test_a_check_that_hangs_fails_alone() -> None:
    never = threading.Event()
    found = checks.run_checks({"stuck": lambda: (never.wait(30), ("PASS", ""))[1], "memory": checks.memory}, 0.2)
    assert [(o.check, o.status) for o in found] == [("stuck", "FAIL"), ("memory", "PASS")]
    assert found[0].detail == "did not end within 0.2 s"
    never.set()


def test_a_users_check_fails_by_raising_or_by_what_it_returns() -> None:
    def raises() -> None:
        raise OSError("the licence server is gone")

    assert status("user", checks.users_check(raises)) == ("FAIL", "OSError: the licence server is gone")
    assert status("user", checks.users_check(lambda: False)) == ("FAIL", "it returned False")
    assert status("user", checks.users_check(lambda: "too hot")) == ("FAIL", "too hot")
    assert status("user", checks.users_check(lambda: None)) == ("PASS", "")


def test_a_disk(tmp_path: Path) -> None:
    assert status("disk", checks.disk(tmp_path))[0] == "PASS"
    assert status("disk", checks.disk(tmp_path / "gone"))[0] == "FAIL"


def test_a_link_that_was_up_and_is_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_NET", tmp_path)
    monkeypatch.setattr(checks, "_INFINIBAND", tmp_path / "none")
    for name in ("eth0", "eth1"):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "operstate").write_text("up\n")
    before = checks.links_up()
    assert status("links", checks.links(before)) == ("PASS", "up: eth0, eth1")
    (tmp_path / "eth1" / "operstate").write_text("down\n")
    assert status("links", checks.links(before)) == ("FAIL", "down: eth1")
    assert status("links", checks.links(frozenset()))[0] == "UNAVAILABLE"


def driver(**says: Any) -> types.ModuleType:
    """A stand-in for pynvml."""
    nvml: Any = types.ModuleType("pynvml")
    error = type("NVMLError", (Exception,), {})
    nvml.NVMLError, nvml.NVMLError_GpuIsLost = error, type("NVMLError_GpuIsLost", (error,), {})
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = nvml.NVML_VOLATILE_ECC = nvml.NVML_TEMPERATURE_GPU = 0
    nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 1
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetTotalEccErrors = lambda *a: says["ecc"]
    nvml.nvmlDeviceGetRemappedRows = lambda handle: (0, 0, 0, says.get("remap_failed", 0))
    nvml.nvmlDeviceGetNvLinkState = lambda handle, link: says["links"][link]
    value = types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=says.get("action", 0)))
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: [value]
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 61
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4
    return nvml  # type: ignore[no-any-return]


def test_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(ecc=2, links=[1] * 18))
    before = gpu_baseline("abc")
    assert before is not None and before.ecc_errors == 2 and len(before.nvlinks) == 18
    assert {o.status for o in checks.run_checks(gpu_checks(before))} == {"PASS"}
    monkeypatch.setitem(sys.modules, "pynvml", driver(ecc=3, links=[1] * 17 + [0], action=2))
    found = {o.check: (o.status, o.detail) for o in checks.run_checks(gpu_checks(before))}
    assert found["ecc"] == ("FAIL", "1 uncorrected ECC errors since the start")
    assert found["nvlink"] == ("FAIL", "links down: [17]")
    assert found["recovery_action"] == ("FAIL", "the driver asks for recovery action 2")
    assert found["temperature"] == ("PASS", "61 C, throttle reasons 0x4")


def test_without_the_library_nothing_is_said_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_baseline("abc") is None
    assert {o.status for o in checks.run_checks(gpu_checks(None))} == {"UNAVAILABLE"}
