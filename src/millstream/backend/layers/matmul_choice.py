"""Measures at load what computes a weight's products faster: our kernel or MLX's operations, and which shape of blocks.

What is compared are whole forms, with norm, activation and residual, as wall time of a chain of launches, so that the
host's share counts where it is the larger one. Small weights are not measured: a step of a small model waits for its
host, and a kernel costs it least.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import matmul_tuning, small_matmul
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.kernels.matmul_tilings import MOST_ROWS, SHAPES, USUAL, WIDTHS, BlockShape
from millstream.backend.kernels.matmul_tuning import Key, Role
from millstream.backend.kernels.weights import Dense, Form, Norm, Weight
from millstream.backend.layers import matmul_reference

log = logging.getLogger(__name__)

MIN_BYTES = 16 << 20
"""Of a weight that is worth measuring: its reading takes longer than the host needs for a launch."""
LAUNCHES = 40
"""Of a chain: so many that what an evaluation costs by itself does not count."""
COPIES_BYTES = 192 << 20
"""Of different weights in a chain, at least: more than a cache holds."""
GAIN = 0.10
"""How much less time MLX's operations must take: a row's numbers then depend on the width of its batch."""

SHAPED_BYTES = 4 << 20
"""Of a weight whose shape of blocks is worth choosing: the host takes longer for a launch than smaller ones do."""
SHAPE_GAIN = 0.03
"""How much less time another shape must take than the usual one. No number depends on it."""
RUNS = 6
TOLERANCE = 0.02
"""How far the numbers of two products may be apart, relative to their size: bfloat16 rounds to a 256th."""

Measure = Callable[[Key, Any, bool], float]
Steady = Callable[[Key, Dense], int]
Agrees = Callable[[Key, Any], bool]
MeasureShape = Callable[[Weight, BlockShape], float]


def tune(role: Role, weight: Dense, measure: Measure, steady: Steady) -> None:
    """Choose for all weights of this role and size, for all widths, unless that is done. `steady`: up to how many rows
    MLX's operations give a row the same numbers. Passes that verify drafts are no wider, so few rows, for which drafts
    pay most, take them only if that is as many as our kernel takes."""
    if weight.weight.nbytes < MIN_BYTES or role == "qkv_rope":
        return
    keys: list[Key] = [(role, weight.outputs, weight.inputs, width) for width in WIDTHS]
    unknown = [key for key in keys if not matmul_tuning.known(key)]
    if unknown:
        rehearse(lambda: [measure(key, weight, False) for key in unknown])
    for key in unknown:
        ours, mlx = measure(key, weight, False), measure(key, weight, True)
        faster = mlx < (1 - GAIN) * ours
        steady_to = steady(key, weight) if faster else MOST_ROWS
        faster = faster and (key[-1] > WIDTHS[0] or steady_to == MOST_ROWS)
        matmul_tuning.decide(key, faster, steady_to=steady_to)
        log.debug("%s of %dx%d, %d rows: %.3f ms by our kernel, %.3f by MLX", *key, 1e3 * ours, 1e3 * mlx)


def tune_many(role: Role, weight: Dense, measure: Measure, agrees: Agrees) -> None:
    """Choose for decode steps of many rows, unless that is done: our kernels are taken where they are faster, once
    their numbers were seen to be right."""
    if weight.weight.nbytes < SHAPED_BYTES or not small_matmul.takes_many(weight):
        return
    keys: list[Key] = [(role, weight.outputs, weight.inputs, width) for width in matmul_tuning.many_widths()]
    unknown = [key for key in keys if not matmul_tuning.known(key)]
    if unknown:
        rehearse(lambda: [measure(key, weight, False) for key in unknown])
    for key in unknown:
        try:
            right = agrees(key, weight)
            ours, mlx = measure(key, weight, False), measure(key, weight, True)
        except RuntimeError as error:  # it cannot be compiled or launched
            log.warning("products of %dx%d are computed by MLX for %d rows: %s", *key[1:], error)
            matmul_tuning.decide(key, True)
            continue
        if not right:
            log.warning("products of %dx%d are computed by MLX for %d rows: our kernel's numbers differ", *key[1:])
        matmul_tuning.decide(key, not right or mlx < ours)
        log.debug("%s of %dx%d, %d rows: %.3f ms by our kernel, %.3f by MLX", *key, 1e3 * ours, 1e3 * mlx)


def tune_body(role: Role, weight: Dense, measure: Measure) -> None:
    """Choose whether weights of this size multiply in warp groups, where there are any, unless that is done: at all
    widths or at none, as both give a row other numbers."""
    size = matmul_tuning.size_of(weight)
    if not small_matmul.in_warpgroups(weight) or weight.weight.nbytes < SHAPED_BYTES or matmul_tuning.body_known(size):
        return
    keys: list[Key] = [(role, weight.outputs, weight.inputs, width) for width in WIDTHS]

    def take(warpgroups: bool) -> list[float]:
        matmul_tuning.decide_body(size, warpgroups)
        return [measure(key, weight, False) for key in keys]

    try:
        rehearse(lambda: [take(body) for body in (True, False)])
        taken = {body: take(body) for body in (True, False)}
    except RuntimeError as error:  # one of them cannot be compiled or launched
        log.warning("products of %dx%d are not computed in warp groups: %s", *size[1:], error)
        matmul_tuning.decide_body(size, False)
        return
    # One row counts as much as many: what is lost is compared, not what is taken.
    shares = [groups / warps for groups, warps in zip(taken[True], taken[False], strict=True)]
    matmul_tuning.decide_body(size, sum(shares) <= len(shares))
    times = ", ".join(f"{1e3 * each:.3f}" for body in (True, False) for each in taken[body])
    log.debug("%s of %dx%d, %s rows in warp groups, then by warps: %s ms", role, *size[1:], WIDTHS, times)


def tune_shape(weight: Weight, measure: MeasureShape) -> None:
    """Choose the shape of blocks for few rows, for all weights of this size, unless that is done."""
    size = matmul_tuning.size_of(weight)
    if small_matmul.in_warpgroups(weight):
        return
    if sum(array.nbytes for array in weight.arrays) < SHAPED_BYTES or matmul_tuning.shape_known(size):
        return
    try:
        rehearse(lambda: [measure(weight, shape) for shape in SHAPES])
        taken = {shape: measure(weight, shape) for shape in SHAPES}
    except RuntimeError as error:  # one of them cannot be compiled or launched
        log.warning("the shape of blocks for %dx%d is the usual one: %s", *size[1:], error)
        matmul_tuning.decide_shape(size, USUAL)
        return
    best = min(taken, key=lambda shape: taken[shape])
    chosen = best if taken[best] < (1 - SHAPE_GAIN) * taken[USUAL] else USUAL
    matmul_tuning.decide_shape(size, chosen)
    times = ", ".join(f"{shape.tiles}{' walking' * shape.walks} {1e3 * each:.3f}" for shape, each in taken.items())
    log.debug("%d launches of %dx%d, %s, by tiles: %s ms", LAUNCHES, *size[1:], size[0] or "dense", times)


def shape_seconds(weight: Weight, shape: BlockShape) -> float:
    """The shortest of a few chains of launches for one row, with blocks of this shape. Each launch waits for the one
    before, as in a step."""
    size, arrays, form = matmul_tuning.size_of(weight), weight.arrays, weight.form
    copies = max(1, min(LAUNCHES, COPIES_BYTES // sum(array.nbytes for array in arrays)))
    weights = [arrays, *(tuple(array * 1 for array in arrays) for _ in range(copies - 1))]
    x, out = (mx.zeros((1, 1, count), dtype=dtype_of(weight)) for count in (weight.inputs, weight.outputs))
    mx.eval(x, out, weights)

    def chain(x: mx.array, out: mx.array, weights: list[tuple[mx.array, ...]]) -> mx.array:
        for number in range(LAUNCHES):
            out = small_matmul.matmul_add(x, form.of(weights[number % len(weights)]), out)
        return out

    run = mx.compile(chain)
    matmul_tuning.decide_shape(size, shape)
    try:
        return _shortest(lambda: run(x, out, weights), RUNS)
    finally:
        matmul_tuning.decide_shape(size, None)


def _shortest(run: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        mx.eval(run())
        taken.append(time.perf_counter() - start)
    return min(taken)


def seconds(key: Key, weight: Weight, by_mlx: bool) -> float:
    """The shortest of a few chains of launches."""
    role, _, inputs, width = key
    bare = dataclasses.replace(weight, tickets=None)
    arrays, form = bare.arrays, bare.form
    x = mx.zeros((width, 1, inputs), dtype=dtype_of(weight))
    copies = max(1, min(LAUNCHES, COPIES_BYTES // sum(array.nbytes for array in arrays)))
    weights = [arrays, *(tuple(array * 1 for array in arrays) for _ in range(copies - 1))]
    rest = [mx.zeros((width, 1, weight.outputs), dtype=x.dtype), mx.ones((inputs,), dtype=x.dtype)]
    mx.eval(x, weights, rest)
    functions: Any = matmul_reference if by_mlx else small_matmul
    # Each launch has its own counters: they may overlap here.
    prepared = [small_matmul.prepare(form.of(weights[number % len(weights)])) for number in range(LAUNCHES)]
    mx.eval([each.arrays for each in prepared])
    chain = mx.compile(functools.partial(_chain, functions, role, prepared[0].form))
    return _shortest(lambda: chain(x, [each.arrays for each in prepared], rest), 4)


def steady(key: Key, weight: Dense) -> int:
    """Up to how many rows MLX's operations give rows bitwise the same numbers as at this width; 0 if one row alone,
    which takes the choice of the first width, gets others."""
    role, outputs, inputs, width = key
    x, rest = (
        mx.random.normal((MOST_ROWS, 1, size), key=mx.random.key(size)).astype(weight.weight.dtype)
        for size in (inputs, outputs)
    )
    norm = mx.ones((inputs,), dtype=x.dtype)

    def made(rows: int) -> mx.array:
        return _role(matmul_reference, role, x[:rows], weight, [rest[:rows], norm])

    wanted = made(width)
    if width == WIDTHS[0] and not mx.array_equal(made(1), wanted[:1]).item():
        return 0
    wider = [*(each for each in WIDTHS if each > width), *range(2 * WIDTHS[-1], MOST_ROWS + 1, WIDTHS[-1])]
    same = itertools.takewhile(lambda rows: mx.array_equal(made(rows)[:width], wanted).item(), wider)
    return max(same, default=width)


def agrees(key: Key, weight: Weight, unpacked: Dense | None = None) -> bool:
    """Whether our kernel gives MLX's numbers, but for rounding. `unpacked`: what MLX multiplies with instead."""
    role, outputs, inputs, width = key
    x, rest = (
        mx.random.normal((width, 1, size), key=mx.random.key(size)).astype(dtype_of(weight))
        for size in (inputs, outputs)
    )
    norm = mx.ones((inputs,), dtype=x.dtype)
    prepared = small_matmul.prepare(weight)
    ours = _role(small_matmul, role, x, prepared, [rest, norm]).astype(mx.float32)
    mlx = _role(matmul_reference, role, x, unpacked or weight, [rest, norm]).astype(mx.float32)
    return bool((mx.linalg.norm(ours - mlx) <= TOLERANCE * mx.linalg.norm(mlx)).item())


def dtype_of(weight: Weight) -> mx.Dtype:
    """The type of what a weight is multiplied with."""
    if isinstance(weight, Dense):
        return weight.weight.dtype
    return weight.scales.dtype if weight.mode == "affine" else mx.bfloat16


def _chain(
    functions: Any, role: Role, form: Form, x: mx.array, weights: list[tuple[mx.array, ...]], rest: list[mx.array]
) -> list[mx.array]:
    if role in ("matmul", "glu"):
        return [_role(functions, role, x, form.of(arrays), rest) for arrays in weights]
    # Each launch waits for the one before, as in a step: what blocks hand over to each other is not hidden.
    out, norm = rest
    for arrays in weights:
        out = _role(functions, role, x, form.of(arrays), [out, norm])
    return [out]


def _role(functions: Any, role: Role, x: mx.array, weight: Weight, rest: list[mx.array]) -> mx.array:
    """`rest`: a residual and a norm's weight. Heads cost what a residual does, about."""
    out: mx.array
    if role == "matmul_add":
        out = functions.matmul_add(x, weight, rest[0])
    elif role == "qkv_rope":
        out = functions.matmul_add(x, weight, rest[0], norm=Norm(rest[1], 1e-5))
    elif role == "glu":
        out = functions.glu(x, weight, norm=Norm(rest[1], 1e-5))
    else:
        out = functions.matmul(x, weight)
    return out
