"""What the driver says of one GPU, through nvidia-ml-py (extra `gpu`). Without it every check is UNAVAILABLE."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ridethrough.health.checks import Check, Finding

_MOST_LINKS = 18
_RECOVERY_ACTION = 0  # none needed


@dataclass(frozen=True)
class GpuBaseline:
    """As found at the start: uncorrected ECC errors, active NVLinks."""

    uuid: str
    ecc_errors: int
    nvlinks: frozenset[int]


def gpu_baseline(uuid: str) -> GpuBaseline | None:
    """None where nvidia-ml-py or the driver does not answer. `uuid` as torch has it, with or without `GPU-`."""
    try:
        nvml, handle = _open(uuid)
        return GpuBaseline(uuid, _ecc_errors(nvml, handle), _nvlinks(nvml, handle))
    except Exception:  # the library's errors have no class that we could name without importing it
        return None


def gpu_checks(before: GpuBaseline | None) -> dict[str, Check]:
    """ECC, NVLink and the driver's recovery action can fail; temperature and throttling are only reported."""
    if before is None:
        return dict.fromkeys(("ecc", "nvlink", "recovery_action", "temperature"), _unavailable)
    return {
        "ecc": lambda: _asked(_ecc, before),
        "nvlink": lambda: _asked(_nvlink, before),
        "recovery_action": lambda: _asked(_recovery, before),
        "temperature": lambda: _asked(_temperature, before),
    }


def _unavailable() -> Finding:
    return "UNAVAILABLE", "nvidia-ml-py or the driver does not answer"


def _asked(question: Any, before: GpuBaseline) -> Finding:
    try:
        nvml, handle = _open(before.uuid)
    except Exception as error:  # of the library, which may be missing
        return "UNAVAILABLE", str(error)
    try:
        return question(nvml, handle, before)  # type: ignore[no-any-return]
    except nvml.NVMLError as error:
        lost = getattr(nvml, "NVMLError_GpuIsLost", None)
        if lost is not None and isinstance(error, lost):
            return "FAIL", "the GPU is lost"
        return "UNAVAILABLE", str(error)


def _open(uuid: str) -> tuple[Any, Any]:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _ecc(nvml: Any, handle: Any, before: GpuBaseline) -> Finding:
    fresh = _ecc_errors(nvml, handle) - before.ecc_errors
    if fresh > 0:
        return "FAIL", f"{fresh} uncorrected ECC errors since the start"
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    if failed:
        return "FAIL", "a row could not be remapped"
    return "PASS", "a row is remapped at the next reset" if pending else ""


def _ecc_errors(nvml: Any, handle: Any) -> int:
    try:
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))
    except nvml.NVMLError:
        return 0


def _nvlinks(nvml: Any, handle: Any) -> frozenset[int]:
    active = set()
    for link in range(_MOST_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                active.add(link)
        except nvml.NVMLError:
            break
    return frozenset(active)


def _nvlink(nvml: Any, handle: Any, before: GpuBaseline) -> Finding:
    if not before.nvlinks:
        return "UNAVAILABLE", "no NVLink was active at the start"
    down = sorted(before.nvlinks - _nvlinks(nvml, handle))
    return ("FAIL", f"links down: {down}") if down else ("PASS", f"{len(before.nvlinks)} links")


def _recovery(nvml: Any, handle: Any, before: GpuBaseline) -> Finding:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return "UNAVAILABLE", "this nvidia-ml-py does not know it"
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != 0:
        return "UNAVAILABLE", "the driver does not tell"
    action = int(value.value.uiVal)
    return ("PASS", "") if action == _RECOVERY_ACTION else ("FAIL", f"the driver asks for recovery action {action}")


def _temperature(nvml: Any, handle: Any, before: GpuBaseline) -> Finding:
    degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return "PASS", f"{degrees} C, throttle reasons {reasons:#x}"
