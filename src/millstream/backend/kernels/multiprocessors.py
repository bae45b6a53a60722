"""How many multiprocessors the GPU has: by this, not by one GPU's number, work is split into blocks."""

from __future__ import annotations

import ctypes
import functools

UNKNOWN = 100
"""Taken where the driver does not say: between a workstation's and a large GPU's."""
_ATTRIBUTE = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"""


@functools.cache
def multiprocessors() -> int:
    """Of MLX's default GPU, asked of CUDA's driver: MLX does not tell."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return UNKNOWN
    device, count = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(count), _ATTRIBUTE, device)
    )
    return UNKNOWN if failed else count.value
