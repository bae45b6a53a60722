"""The exponential function and GELU for x86_64 CPUs. MLX's are scalar code there: 30 and 45 ns per element.

Large arrays go through MKL's vector mathematics if MKL is loaded (0.4 and 2 ns), small ones through a polynomial of
operations that MLX vectorises (8 ns).
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

LARGE = 65_536
"""Elements of a large array. Below this, waiting for the argument costs more than MKL saves."""

_BLOCK = 131_072
"""Elements that GELU computes at once: they stay in the processor's cache."""
_LOG2_E = 1.4426950408889634
# 2**f for |f| <= 1/2: the series of exp(f ln 2), to the seventh power, good to the last bits of a float32.
_SERIES = tuple(math.log(2) ** power / math.factorial(power) for power in range(8))
_MODE = 0x280000 | 0x100 | 0x1
"""MKL's mode: denormal numbers are zero, no errors are raised, the last bit may be off by one."""


def exp_in_place(x: mx.array, large: int = LARGE) -> mx.array:
    """e**x. `x` is a float32 result that nothing else refers to: its memory may be overwritten. `large`: from how many
    elements on it pays to wait for the argument."""
    return _overwrite(x) if x.size >= large and _mkl("vmsExp") is not None else exp_polynomial(x)


def gelu_in_place(x: mx.array) -> mx.array:
    """GELU, exact. `x` as for `exp_in_place`. Needs MKL: see `has_mkl`."""
    mx.eval(x)
    memory = np.array(x, copy=False)
    if not memory.flags.c_contiguous:
        return gelu_in_place(mx.contiguous(x))
    numbers = memory.reshape(-1)
    distribution = _mkl("vmsCdfNorm")
    scratch = np.empty(min(numbers.size, _BLOCK), np.float32)
    with np.errstate(invalid="ignore"):  # infinity times zero is not a number in MLX's GELU too
        for start in range(0, numbers.size, _BLOCK):
            block = numbers[start : start + _BLOCK]
            share = scratch[: block.size]
            distribution(block.size, block.ctypes.data, share.ctypes.data, _MODE)
            np.multiply(block, share, out=block)
    return x


def exp_is_scalar() -> bool:
    """True if MLX's own exponential computes one number after the other on this machine's CPU."""
    return platform.machine() == "x86_64"


def has_mkl() -> bool:
    """True if MKL's vector mathematics can be called."""
    return _mkl("vmsExp") is not None and _mkl("vmsCdfNorm") is not None


def exp_of_difference(x: mx.array, top: mx.array, large: int = LARGE) -> mx.array:
    """e**(x - top), of float32 numbers. `large` as for `exp_in_place`."""
    if x.size >= large and _mkl("vmsExp") is not None:
        return _overwrite(x - top)
    value, power = _difference_parts(x, top)
    return value * mx.view(power, mx.float32)


def exp_polynomial(x: mx.array) -> mx.array:
    """e**x as 2**n * 2**f. The power of two is built from its bits."""
    value, power = _parts(x)
    return value * mx.view(power, mx.float32)


def _parts(x: mx.array) -> tuple[mx.array, mx.array]:
    """The second factor of `exp_polynomial`, and the bits of the first."""
    scaled = mx.clip(x * _LOG2_E, -126.0, 126.0)
    exponent = (scaled + mx.where(scaled >= 0, 0.5, -0.5)).astype(mx.int32)
    fraction = scaled - exponent.astype(mx.float32)
    value: Any = _SERIES[-1]
    for factor in reversed(_SERIES[:-1]):
        value = value * fraction + factor
    return value, (exponent + 127) << 23


# For any shape: a step's scores have another one for every token.
_difference_parts = mx.compile(lambda x, top: _parts(x - top), shapeless=True)


def gelu(x: mx.array) -> mx.array:
    """GELU, exact, of any array."""
    if x.size < LARGE or x.dtype != mx.float32 or not has_mkl():
        exact: mx.array = nn.gelu(x)
        return exact
    return gelu_in_place(mx.array(np.array(x, copy=False)))


@functools.cache
def _mkl(name: str) -> Any:
    """A function of MKL; None unless `environment.load_blas` loaded MKL with RTLD_GLOBAL."""
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
    _mkl("vmsExp")(x.size, memory.ctypes.data, memory.ctypes.data, _MODE)
    return x


def set_vector_threads(count: int) -> int:
    """How many threads MKL uses for calls from this thread; 0 for as many as it likes. Returns the number before.

    MLX calls MKL for matmuls on a thread of its own, which has its own helpers. Those of vector functions spin for a
    while after each call and take cores from the matmuls: with many small calls, one thread was up to a quarter faster
    on a busy 2-core machine, unless KMP_BLOCKTIME is short."""
    if not has_mkl():
        return 0
    function = ctypes.CDLL(None).MKL_Set_Num_Threads_Local
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return int(function(count))
