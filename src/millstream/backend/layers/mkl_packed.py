"""Matmuls of a few rows with weights that MKL has packed in advance, for large layers on x86_64 CPUs.

MKL's plain matmul of 4 to 48 rows reads a weight at less than half of the memory's bandwidth, in whichever layout: 24
layers of 3072 x 576 take 45 ms of a 2.5 GHz Xeon core with 4 rows and 44 with 16. With packed weights it is 19 and 27
ms. MLX does not know that function, so the input is evaluated and MKL is called from here; and the weight is in memory
twice, because one row is fastest in a graph of MLX's own.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import mlx.core as mx
import numpy as np

LEAST_SIZE = 2**20
"""Elements of a weight. For smaller ones, to wait for the input costs as much as packing saves."""

SHARE_OF_MEMORY = 4
"""Weights are packed if so many times their size is free."""

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED, _PACKED, _SECOND = 101, 111, 112, 151, 162
"""MKL's names for these are CblasRowMajor, CblasNoTrans, CblasTrans, CblasPacked and CblasBMatrix."""
_ROWS = 16
"""For which the weight is packed; the form is the same for all numbers of rows, which `works` has tried."""
_ALIGNMENT = 64


class PackedWeight:
    """A weight (outputs, inputs) in MKL's own form. It is made when it is first used."""

    def __init__(self) -> None:
        self._packed: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def multiply(self, x: mx.array, weight: mx.array) -> mx.array:
        """x @ weight.T. Evaluates `x`."""
        if self._packed is None:
            self._packed = _pack(weight)
        outputs, inputs = weight.shape
        mx.eval(x)
        given = np.array(x, copy=False)
        if not given.flags.c_contiguous:
            given = np.ascontiguousarray(given)
        out = np.empty((*x.shape[:-1], outputs), np.float32)
        _mkl().cblas_sgemm_compute(
            _ROW_MAJOR, _AS_IT_IS, _PACKED, given.size // inputs, outputs, inputs,
            given.ctypes.data, inputs, self._packed.ctypes.data, inputs, 0.0, out.ctypes.data, outputs,
        )  # fmt: skip
        return mx.array(out)


def can_be_packed(weight: mx.array) -> bool:
    return weight.ndim == 2 and weight.dtype == mx.float32 and weight.size >= LEAST_SIZE


@functools.cache
def works() -> bool:
    """True if MKL is loaded, has the function, and gives the right numbers for every number of rows."""
    if _mkl() is None:
        return False
    numbers = np.random.default_rng(0)
    weight = numbers.normal(size=(72, 40)).astype(np.float32)
    packed = PackedWeight()
    for rows in range(1, 65):
        x = numbers.normal(size=(rows, 40)).astype(np.float32)
        got = np.array(packed.multiply(mx.array(x), mx.array(weight)))
        if not np.allclose(got, x @ weight.T, atol=1e-4):
            return False
    return True


def _pack(weight: mx.array) -> np.ndarray[Any, np.dtype[np.float32]]:
    mx.eval(weight)
    plain = np.ascontiguousarray(np.array(weight, copy=False))
    outputs, inputs = plain.shape
    size = _mkl().cblas_sgemm_pack_get_size(_SECOND, _ROWS, outputs, inputs)
    memory = np.empty(size // 4 + _ALIGNMENT, np.float32)
    packed = memory[-memory.ctypes.data % _ALIGNMENT // 4 :]
    _mkl().cblas_sgemm_pack(
        _ROW_MAJOR, _SECOND, _TRANSPOSED, _ROWS, outputs, inputs, 1.0, plain.ctypes.data, inputs, packed.ctypes.data
    )
    return packed


@functools.cache
def _mkl() -> Any:
    """The library; None unless `environment.load_blas` loaded MKL with RTLD_GLOBAL."""
    library = ctypes.CDLL(None)
    number, factor, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    try:
        library.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
        library.cblas_sgemm_pack_get_size.argtypes = [number] * 4
        library.cblas_sgemm_pack.argtypes = [*[number] * 6, factor, address, number, address]
        library.cblas_sgemm_compute.argtypes = [
            *[number] * 6, address, number, address, number, factor, address, number,
        ]  # fmt: skip
    except AttributeError:
        return None
    for function in (library.cblas_sgemm_pack, library.cblas_sgemm_compute):
        function.restype = None
    return library
