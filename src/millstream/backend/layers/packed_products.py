"""Matmuls with packed weights, whatever the number of rows: few by our kernels, many by unpacking the weight first.

MLX multiplies with packed weights on every device, but on CUDA its kernels for many rows may take longer than unpacking
one matrix and having cuBLAS multiply with it. That takes memory for as long as it is computed, which calibration counts
(`workspace_bytes`). Which of both is faster is measured at load.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.kernels import packed_tilings, small_matmul, unpack_weight
from millstream.backend.kernels.weights import Packed, PackedForm
from millstream.backend.layers.projections import joined_layers

KERNEL_ROWS = 256
"""Our kernels take 64 rows at once, and unpack the weight again for the next 64."""
MEASURED_ROWS = (512, 2048)
RUNS = 3
TRIED_ROWS = (5, 64)
TOLERANCE = 0.02
"""How far products may be from those of the unpacked weight, relative to the largest."""

log = logging.getLogger(__name__)

_unpacked_from: dict[PackedForm, int] = {}
"""Rows from which on it is faster to unpack first. It is a property of the device, so engines may share it."""


def product(x: mx.array, weight: Packed) -> mx.array:
    """x @ weight.T"""
    rows = x.size // x.shape[-1]
    if rows <= KERNEL_ROWS and _kernels_take(x.dtype, weight):
        flat = x.reshape(rows, 1, x.shape[-1])
        return _by_kernel(weight.form)(flat, *weight.arrays).reshape(*x.shape[:-1], weight.outputs)
    by = _by_unpacking if rows >= _unpacked_from.get(weight.form, 1) else _by_mlx
    return by(x.reshape(rows, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.outputs)


def _kernels_take(dtype: mx.Dtype, weight: Packed) -> bool:
    if not _on_supported_gpu() or not packed_tilings.fits(weight):
        return False
    return dtype == weight.scales.dtype if weight.mode == "affine" else dtype in (mx.bfloat16, mx.float16)


@functools.cache
def _on_supported_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.DeviceType.cpu, 0) and small_matmul.supported_here()


@functools.cache
def _by_kernel(form: PackedForm) -> Callable[..., mx.array]:
    """Compiled, so that a kernel's source is not assembled at every call."""

    def matmul(x: mx.array, *arrays: mx.array) -> mx.array:
        weight = form.of(arrays)
        if (needed := packed_tilings.counters(weight, x.shape[0])) and needed * 4 <= x.nbytes:
            # New ones for each launch: those of several prompts may run at the same time.
            weight = dataclasses.replace(weight, tickets=x.reshape(-1).view(mx.uint32)[:needed] & 0)
        return small_matmul.matmul(x, weight)

    return mx.compile(matmul)


def kernels_agree(weight: Packed) -> bool:
    """True if our kernels take the weight, and multiply with its form on this device as they should."""
    if not packed_tilings.fits(weight):
        return False
    dtype = weight.scales.dtype if weight.mode == "affine" else mx.bfloat16
    return _form_agrees(dataclasses.replace(weight.form, counted=False), dtype)


@functools.cache
def _form_agrees(form: PackedForm, dtype: mx.Dtype) -> bool:
    numbers = mx.random.normal((96, 1024), key=mx.random.key(1)).astype(dtype)
    parts = mx.quantize(numbers, form.group_size, form.bits, form.mode)
    weight = Packed(parts[0], parts[1], parts[2] if form.biased else None, form.bits, form.group_size, form.mode)
    try:
        apart = max(_disagreement(weight, rows, dtype) for rows in TRIED_ROWS)
    except (RuntimeError, ValueError) as error:
        log.warning("Weights are unpacked: the kernel for %s fails (%s)", form, error)
        return False
    if not apart <= TOLERANCE:  # not a number is no agreement either
        log.warning("Weights are unpacked: the kernel for %s gives other numbers, by %.2g", form, apart)
        return False
    return True


def _disagreement(weight: Packed, rows: int, dtype: mx.Dtype) -> float:
    x = mx.random.normal((rows, 1, weight.inputs), key=mx.random.key(rows)).astype(dtype)
    expected = (x @ _unpacked_by_mlx(weight, dtype).T).astype(mx.float32)
    ways = (small_matmul.matmul(x, weight), _by_unpacking(x, weight))
    apart = [mx.abs(got.astype(mx.float32) - expected).max() for got in ways]
    return float((mx.stack(apart).max() / mx.abs(expected).max()).item())  # type: ignore[arg-type]


def unpacked(weight: Packed, dtype: mx.Dtype) -> mx.array:
    """The weight as a matrix."""
    if _kernels_take(dtype, weight):
        return _unpacking(weight.form, dtype)(*weight.arrays)
    return _unpacked_by_mlx(weight, dtype)


def _unpacked_by_mlx(weight: Packed, dtype: mx.Dtype) -> mx.array:
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
    """Find out, for each form of its weights, from how many rows on they are unpacked first: with the largest one that
    is no table of tokens, since that is used for few rows alone."""
    largest: dict[PackedForm, Packed] = {}
    for layer in packed_layers(model):
        weight = packed_weight(layer)
        if isinstance(layer, nn.QuantizedLinear) and weight.form not in _unpacked_from:
            largest[weight.form] = max(largest.get(weight.form, weight), weight, key=lambda each: each.packed.size)
    for form, weight in largest.items():
        _unpacked_from[form] = _rows_worth_unpacking(weight)


def _rows_worth_unpacking(weight: Packed) -> int:
    least = KERNEL_ROWS + 1
    dtype = weight.scales.dtype if weight.mode == "affine" else mx.bfloat16
    for rows in MEASURED_ROWS:
        x = mx.zeros((rows, weight.inputs), dtype=dtype)
        by_mlx, by_unpacking = (1e3 * _seconds(by, x, weight) for by in (_by_mlx, _by_unpacking))
        log.debug("%s, %d rows: packed %.2f ms, unpacked first %.2f ms", weight.form, rows, by_mlx, by_unpacking)
        if by_unpacking <= by_mlx:
            break
        least = rows + 1
    return least


def _seconds(by: Callable[[mx.array, Packed], mx.array], x: mx.array, weight: Packed) -> float:
    mx.eval(by(x, weight))
    took = []
    for _ in range(RUNS):
        started = time.perf_counter()
        mx.eval(by(x, weight))
        took.append(time.perf_counter() - started)
    return min(took)
