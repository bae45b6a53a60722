"""Measures at load what computes a weight's products fastest: our kernel, in one of some shapes, or MLX's operations.

What is compared are whole forms, with norm, activation and residual, as wall time of a chain of launches, so that the
host's share counts where it is the larger one. Small weights are not measured: a step of a small model waits for its
host, and a kernel costs it least.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import matmul_tilings, matmul_tuning, small_matmul
from millstream.backend.kernels.matmul_tilings import WIDTHS, Tiling
from millstream.backend.kernels.matmul_tuning import Choice, Key, Role
from millstream.backend.kernels.weights import Dense, Norm
from millstream.backend.layers import matmul_reference

log = logging.getLogger(__name__)

MIN_BYTES = 24 << 20
"""Of a weight that is worth measuring: its reading takes longer than the host needs for a launch."""
LAUNCHES = 12
COPIES_BYTES = 192 << 20
"""Of different weights in a chain, at least: more than a cache holds."""
SHAPE_GAIN, MLX_GAIN = 0.05, 0.10
"""How much less time another shape of blocks must take, and MLX's operations: a row's numbers then depend on the
width of its batch, and a step has more operations."""

Measure = Callable[[Key, Dense, Choice], float]


def tune(role: Role, weight: Dense, measure: Measure) -> None:
    """Choose for all weights of this role and size, for all widths, unless that is done."""
    if weight.weight.nbytes < MIN_BYTES or role == "qkv_rope":
        return
    for width in WIDTHS:
        key = (role, weight.outputs, weight.inputs, width)
        if matmul_tuning.choice(key) is None:
            matmul_tuning.choose(key, _fastest(key, weight, measure))


def _fastest(key: Key, weight: Dense, measure: Measure) -> Choice:
    usual, *others = matmul_tilings.candidates(weight.outputs, weight.inputs, key[-1])
    taken: dict[Choice, float] = {usual: measure(key, weight, usual)}
    for tiling in others:
        taken[tiling] = measure(key, weight, tiling) / (1 - SHAPE_GAIN)
    best: Choice = min(taken, key=lambda choice: taken[choice])
    taken["mlx"] = measure(key, weight, "mlx")
    if taken["mlx"] < (1 - MLX_GAIN) * taken[best]:
        best = "mlx"
    log.debug("%s of %dx%d, %d rows: %s (%s)", *key, best, taken)
    return best


def seconds(key: Key, weight: Dense, choice: Choice) -> float:
    """The shortest of a few chains of launches."""
    role, _, inputs, width = key
    x = mx.zeros((width, 1, inputs), dtype=weight.weight.dtype)
    copies = max(1, min(LAUNCHES, COPIES_BYTES // weight.weight.nbytes))
    weights = [weight.weight, *(weight.weight * 1 for _ in range(copies - 1))]
    # Launches that are not in a row may overlap: each has counters of its own.
    tickets = [small_matmul.prepare(weight.weight).arrays[1] for _ in range(LAUNCHES)]
    rest = [mx.zeros((width, 1, weight.outputs), dtype=x.dtype), mx.ones((inputs,), dtype=x.dtype)]
    mx.eval(x, weights, tickets, rest)
    functions: Any = small_matmul if isinstance(choice, Tiling) else matmul_reference
    with matmul_tuning.chosen(key, choice):
        chain = mx.compile(functools.partial(_chain, functions, role, copies))
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            mx.eval(chain(x, weights, tickets, rest))
            taken.append(time.perf_counter() - start)
    return min(taken)


def _chain(
    functions: Any,
    role: Role,
    copies: int,
    x: mx.array,
    weights: list[mx.array],
    tickets: list[mx.array],
    rest: list[mx.array],
) -> list[mx.array]:
    out = []
    for number, ticket in enumerate(tickets):
        weight = Dense(weights[number % copies], ticket)
        if role == "matmul_add":
            out.append(functions.matmul_add(x, weight, rest[0]))
        elif role == "glu":
            out.append(functions.glu(x, weight, norm=Norm(rest[1], 1e-5)))
        else:
            out.append(functions.matmul(x, weight))
    return out
