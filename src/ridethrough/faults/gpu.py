"""Errors of the GPU. Both are sticky: no kernel runs in this process again, so that it has to be replaced.

What only hardware can do (ECC errors, Xid) is not here: nothing in a process brings it about.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ridethrough.faults.shot import FaultRefused, InjectedFault, Shot

_STORE_TO_ADDRESS_0 = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store_to_address_0()
{
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 0;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def guard_cuda(args: Mapping[str, Any]) -> None:
    """Raise FaultRefused unless this process has a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise FaultRefused(
            "fault kinds device_assert and illegal_access are UNAVAILABLE: this process has no CUDA device; "
            "run the job on a GPU, or plan other kinds"
        )


def device_assert(shot: Shot) -> None:
    """An index out of range, which only the kernel sees."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
    raise InjectedFault(f"injected {shot.fault}: index 9 of 4 and no error came")


def illegal_access(shot: Shot) -> None:
    """A kernel of our own stores to an address that is nobody's; the driver compiles it."""
    import torch

    torch.cuda.synchronize()  # the context is there, and earlier kernels are done
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    one = ctypes.c_uint(1)
    for error in (
        driver.cuModuleLoadData(ctypes.byref(module), _STORE_TO_ADDRESS_0),
        driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"store_to_address_0"),
        driver.cuLaunchKernel(kernel, one, one, one, one, one, one, ctypes.c_uint(0), None, None, None),
    ):
        if error:
            raise InjectedFault(f"injected {shot.fault}: the kernel could not be launched (CUresult {error})")
    torch.cuda.synchronize()
    raise InjectedFault(f"injected {shot.fault}: the kernel stored to address 0 and no error came")
