"""The exponential on an x86_64 CPU. MLX's is scalar code there: 30 ns an element.

Many elements go through MKL's vector mathematics where MKL is loaded (0.4 ns), few through a polynomial made of
operations that MLX does compute several at a time (8 ns).
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import mlx.core as mx
import numpy as np

MANY = 65_536
"""Below this, waiting for the argument costs more than it saves."""

_LOG2_E = 1.4426950408889634
# 2**f for |f| <= 1/2: the series of exp(f ln 2), to the seventh power, good to the last bits of a float32.
_SERIES = tuple(math.log(2) ** power / math.factorial(power) for power in range(8))
_MODE = 0x280000 | 0x100 | 0x1
"""Denormal numbers are zero, no errors are raised, the last bit may be off by one."""


def exp_of_fresh(x: mx.array) -> mx.array:
    """e**x. `x` is a float32 result that nothing else holds: its memory may be written over."""
    return _written_over(x) if x.size >= MANY and _library() is not None else exponential(x)


def exponential(x: mx.array) -> mx.array:
    """e**x as 2**n * 2**f. The power of two is put together from its bits."""
    scaled = mx.clip(x * _LOG2_E, -126.0, 126.0)
    whole = (scaled + mx.where(scaled >= 0, 0.5, -0.5)).astype(mx.int32)
    rest = scaled - whole.astype(mx.float32)
    value: Any = _SERIES[-1]
    for factor in reversed(_SERIES[:-1]):
        value = value * rest + factor
    power: mx.array = value * mx.view((whole + 127) << 23, mx.float32)
    return power


@functools.cache
def _library() -> Any:
    """MKL's function, if MKL was opened for everyone to see (`environment.load_blas`)."""
    try:
        function = ctypes.CDLL(None).vmsExp
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong]
    function.restype = None
    return function


def _written_over(x: mx.array) -> mx.array:
    mx.eval(x)
    memory = np.array(x, copy=False)
    if not memory.flags.forc:  # elements repeated or spread out: x.size numbers from its start are not all its own
        return exponential(x)
    _library()(x.size, memory.ctypes.data, memory.ctypes.data, _MODE)
    return x
