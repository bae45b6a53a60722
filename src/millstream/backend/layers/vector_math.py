"""The exponential function, and GELU, for x86_64 CPUs. MLX's are scalar code there: 30 ns per element.

Large arrays go through MKL's vector mathematics if MKL is loaded (0.4 ns), small ones through a polynomial of
operations that MLX vectorises (8 ns).
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

LARGE = 65_536
"""Elements of a large array. Below this, waiting for the argument costs more than MKL saves."""

_LOG2_E = 1.4426950408889634
# 2**f for |f| <= 1/2: the series of exp(f ln 2), to the seventh power, good to the last bits of a float32.
_SERIES = tuple(math.log(2) ** power / math.factorial(power) for power in range(8))
_MODE = 0x280000 | 0x100 | 0x1
"""MKL's mode: denormal numbers are zero, no errors are raised, the last bit may be off by one."""


def exp_in_place(x: mx.array) -> mx.array:
    """e**x. `x` is a float32 result that nothing else refers to: its memory may be overwritten."""
    return _overwrite(x) if x.size >= LARGE and _mkl_exp() is not None else exp_polynomial(x)


def exp_polynomial(x: mx.array) -> mx.array:
    """e**x as 2**n * 2**f. The power of two is built from its bits."""
    scaled = mx.clip(x * _LOG2_E, -126.0, 126.0)
    exponent = (scaled + mx.where(scaled >= 0, 0.5, -0.5)).astype(mx.int32)
    fraction = scaled - exponent.astype(mx.float32)
    value: Any = _SERIES[-1]
    for factor in reversed(_SERIES[:-1]):
        value = value * fraction + factor
    power: mx.array = value * mx.view((exponent + 127) << 23, mx.float32)
    return power


def gelu(x: mx.array) -> mx.array:
    """The exact one, x times the normal distribution's share below x."""
    if x.size < LARGE or x.dtype != mx.float32 or _mkl("vmsCdfNorm") is None:
        exact: mx.array = nn.gelu(x)
        return exact
    share = mx.array(np.array(x, copy=False))  # a copy, which is overwritten
    memory = np.array(share, copy=False)
    _mkl("vmsCdfNorm")(memory.size, memory.ctypes.data, memory.ctypes.data, _MODE)
    return x * share


def _mkl_exp() -> Any:
    return _mkl("vmsExp")


@functools.cache
def _mkl(name: str) -> Any:
    """MKL's function; None unless `environment.load_blas` loaded MKL with RTLD_GLOBAL."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong]
    function.restype = None
    return function


def _overwrite(x: mx.array) -> mx.array:
    mx.eval(x)
    memory = np.array(x, copy=False)
    if not memory.flags.forc:  # broadcast or strided: the x.size numbers from its start are not all its own
        return exp_polynomial(x)
    _mkl_exp()(x.size, memory.ctypes.data, memory.ctypes.data, _MODE)
    return x
