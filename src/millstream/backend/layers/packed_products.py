"""Matmuls with packed weights, whatever the number of rows: few by our kernels, many by unpacking the weight first.

MLX multiplies with packed weights on every device, but on CUDA its kernels for many rows may take longer than unpacking
one matrix and having cuBLAS multiply with it. That takes memory for as long as it is computed, which calibration counts
(`workspace_bytes`). Which of both is faster is measured at load.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.kernels import packed_tilings, small_matmul, unpack_weight
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.kernels.matmul_tilings import MOST_ROWS
from millstream.backend.kernels.matmul_tuning import Size, compiled, size_of, stands_for
from millstream.backend.kernels.weights import Packed, PackedForm
from millstream.backend.layers.projections import joined_layers

KERNEL_ROWS = 64
"""Of a decode step. Our kernels unpack the weight again for every 32 or 64."""
MORE_KERNEL_ROWS = (128, 256, 512)
"""For how many our kernels may still be the fastest way: it is measured."""
MEASURED_ROWS = (512, 2048)
RUNS, TOGETHER = 3, 3

log = logging.getLogger(__name__)

_unpacked_from: dict[PackedForm, int] = {}
"""Rows from which on it is faster to unpack first. It is a property of the device, so engines may share it."""


_kernel_rows: dict[Size, int] = {}
"""Up to how many rows our kernels are the fastest way, by the size of the weight."""


_refused: set[Size] = set()
"""Of weights that our kernels give wrong numbers for."""


def is_refused(weight: Packed) -> bool:
    return size_of(weight) in _refused


def refuse(weight: Packed) -> None:
    """Have MLX compute the products of all weights of this size, for any number of rows. Functions that are compiled
    later follow it."""
    _refused.add(size_of(weight))


def product(x: mx.array, weight: Packed) -> mx.array:
    """x @ weight.T"""
    rows = x.size // x.shape[-1]
    by = _by_unpacking if rows >= _unpacked_from.get(weight.form, 1) else _by_mlx
    # What stands for a step takes what that step takes, however wide it is.
    most = _kernel_rows.get(size_of(weight), KERNEL_ROWS) if stands_for() is None else MOST_ROWS
    if _kernels_take(x.dtype, weight) and rows <= most:
        by = _by_kernel
    return by(x.reshape(rows, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.outputs)


def _kernels_take(dtype: mx.Dtype, weight: Packed) -> bool:
    if not _on_supported_gpu() or not packed_tilings.fits(weight) or is_refused(weight):
        return False
    return dtype == weight.scales.dtype if weight.mode == "affine" else dtype in (mx.bfloat16, mx.float16)


@functools.cache
def _on_supported_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.DeviceType.cpu, 0) and small_matmul.supported_here()


def _by_kernel(x: mx.array, weight: Packed) -> mx.array:
    out: mx.array = _kernel_of(weight.form)(x.reshape(-1, 1, weight.inputs), *weight.arrays)
    return out


@functools.cache
def _kernel_of(form: PackedForm) -> Callable[..., mx.array]:
    """Compiled, so that a kernel's source is not assembled at every call."""

    def matmul(x: mx.array, *arrays: mx.array) -> mx.array:
        return small_matmul.matmul(x, form.of(arrays))

    return compiled(matmul)


def unpacked(weight: Packed, dtype: mx.Dtype) -> mx.array:
    """The weight as a matrix."""
    if _kernels_take(dtype, weight):
        return _unpacking(weight.form, dtype)(*weight.arrays)
    return unpacked_by_mlx(weight, dtype)


def unpacked_by_mlx(weight: Packed, dtype: mx.Dtype) -> mx.array:
    """The same without our kernels."""
    return mx.dequantize(
        weight.packed, weight.scales, weight.biases, weight.group_size, weight.bits, weight.mode, dtype=dtype
    )


@functools.cache
def _unpacking(form: PackedForm, dtype: mx.Dtype) -> Callable[..., mx.array]:
    """Compiled, as above."""

    def unpack(*arrays: mx.array) -> mx.array:
        return unpack_weight.unpack(form.of(arrays), dtype)

    return mx.compile(unpack)


def _by_unpacking(x: mx.array, weight: Packed) -> mx.array:
    return x @ unpacked(weight, x.dtype).T


def _by_mlx(x: mx.array, weight: Packed) -> mx.array:
    # Rows must be rows of one matrix: for several matrices of one row MLX would read the weight for each.
    return mx.quantized_matmul(
        x, weight.packed, weight.scales, weight.biases, True, weight.group_size, weight.bits, weight.mode
    )


def packed_layers(model: Any) -> list[Any]:
    """The quantised linear layers and embeddings of a model, joined ones too."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    layers = [module for _, module in model.named_modules()] + joined_layers(model)
    return [layer for layer in layers if isinstance(layer, kinds)]


def packed_weight(layer: Any) -> Packed:
    """The weight of a quantised layer."""
    return Packed(layer["weight"], layer["scales"], layer.get("biases"), layer.bits, layer.group_size, layer.mode)


def measure_packed_products(model: Any) -> None:
    """Find out, for each size of its weights, up to how many rows our kernels are the fastest way; for each form, with
    the largest one, from how many rows on they are unpacked first. Tables of tokens are used for few rows alone."""
    weights = [packed_weight(layer) for layer in packed_layers(model) if isinstance(layer, nn.QuantizedLinear)]
    sizes = {size_of(weight): weight for weight in weights if size_of(weight) not in _kernel_rows}
    rehearse(lambda: [_by_kernel(_inputs(rows, each), each) for each in sizes.values() for rows in MORE_KERNEL_ROWS])
    for size, weight in sizes.items():
        _kernel_rows[size] = _rows_for_kernels(weight)
    largest: dict[PackedForm, Packed] = {}
    for weight in weights:
        if weight.form not in _unpacked_from:
            largest[weight.form] = max(largest.get(weight.form, weight), weight, key=lambda each: each.packed.size)
    for form, weight in largest.items():
        _unpacked_from[form] = _rows_worth_unpacking(weight)


def _inputs(rows: int, weight: Packed) -> mx.array:
    dtype = weight.scales.dtype if weight.mode == "affine" else mx.bfloat16
    return mx.zeros((rows, weight.inputs), dtype=dtype)


def _rows_for_kernels(weight: Packed) -> int:
    most = KERNEL_ROWS
    for rows in MORE_KERNEL_ROWS:
        x = _inputs(rows, weight)
        if not _kernels_take(x.dtype, weight):
            break
        by_kernel, by_unpacking = (1e3 * _seconds(by, x, weight) for by in (_by_kernel, _by_unpacking))
        log.debug("%s, %d rows: kernel %.2f ms, unpacked first %.2f ms", weight.form, rows, by_kernel, by_unpacking)
        if by_kernel > by_unpacking:
            break
        most = rows
    return most


def _rows_worth_unpacking(weight: Packed) -> int:
    least = KERNEL_ROWS + 1
    for rows in MEASURED_ROWS:
        x = _inputs(rows, weight)
        by_mlx, by_unpacking = (1e3 * _seconds(by, x, weight) for by in (_by_mlx, _by_unpacking))
        log.debug("%s, %d rows: packed %.2f ms, unpacked first %.2f ms", weight.form, rows, by_mlx, by_unpacking)
        if by_unpacking <= by_mlx:
            break
        least = rows + 1
    return least


def _seconds(by: Callable[[mx.array, Packed], mx.array], x: mx.array, weight: Packed) -> float:
    """Of one product, in a few together: a single one would be all waiting."""
    mx.eval(by(x, weight))
    took = []
    for _ in range(RUNS):
        started = time.perf_counter()
        mx.eval([by(x, weight) for _ in range(TOGETHER)])
        took.append(time.perf_counter() - started)
    return min(took) / TOGETHER
