"""RoPE of one token per row, on CPUs: MLX has no operation for it there, and composes it of 20.

Each operation costs the CPU 1 to 3 us however few numbers it has, and each layer rotates queries and keys. As eight
operations, two of them compiled, one takes 16 us instead of 46, 60 times per step of a model with 30 layers. Angles are
computed as MLX does, so that the numbers are the same but for the last bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.generation.layers.block_check import check_rope
from millstream.backend.generation.layers.block_frame import NotUnderstood
from millstream.backend.generation.layers.block_parts import read_rope


@dataclass(frozen=True, slots=True, eq=False)
class StepRope:
    """A rotary embedding as data. Its pairs have the shape (2, pairs), or (pairs, 2) if they stand side by side."""

    frequencies: mx.array
    """Of the pairs: the angle per position."""
    signs: mx.array
    """Of the sines, in the first and the second number of a pair."""
    size: int
    """Numbers of a head that are rotated."""
    traditional: bool
    scale: float
    """Of positions."""
    factor: float
    """What the rotated numbers are multiplied with (YaRN)."""

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """`x`: (rows, heads, 1, numbers). `offset`: the position, of each row or of all."""
        turned = x if x.shape[-1] == self.size else x[..., : self.size]
        positions = mx.array(offset, dtype=mx.float32).reshape(-1, *[1] * x.ndim)
        if self.scale != 1.0:
            positions = positions * self.scale
        cosines, sines = _angles(positions, self.frequencies, self.signs)
        pairs = mx.unflatten(turned, -1, (-1, 2) if self.traditional else (2, -1))
        others = pairs[..., ::-1] if self.traditional else pairs[..., ::-1, :]
        out = mx.flatten(_rotated(pairs, others, cosines, sines), -2)
        if self.factor != 1.0:
            out = out * self.factor
        return out if turned is x else mx.concatenate([out, x[..., self.size :]], axis=-1)


# For any number of rows.
_angles = mx.compile(
    lambda at, frequencies, signs: (mx.cos(at * frequencies), mx.sin(at * frequencies) * signs), shapeless=True
)
_rotated = mx.compile(lambda pairs, others, cosines, sines: pairs * cosines + others * sines, shapeless=True)


def use_step_rope(model: Any) -> int:
    """Have the rotary embeddings of a model compute single tokens so. Returns how many do."""
    count = 0
    for _, module in model.named_modules():
        if "rope" in type(module).__name__.lower() and (rope := _read(module)) is not None:
            kind: Any = type(module)
            module._step_rope = rope
            module.__class__ = _step_class(kind)
            count += 1
    return count


@functools.cache
def _step_class(kind: Any) -> type:
    def call(self: Any, x: mx.array, offset: int | mx.array = 0, **named: Any) -> mx.array:
        if named or x.ndim < 3 or x.shape[-2] != 1 or x.dtype != mx.float32:
            out: mx.array = kind.__call__(self, x, offset, **named)
            return out
        rope: StepRope = self._step_rope
        return rope(x, offset)

    return type(kind.__name__, (kind,), {"__call__": call})


def _read(module: Any) -> StepRope | None:
    """None for kinds that are not known, or that give other numbers than was understood."""
    rope = read_rope(module)
    if rope is None:
        return None
    frequencies, scale, pairs = 1 / rope.periods, 1.0, rope.size // 2
    if isinstance(module, nn.RoPE):
        steps = mx.arange(0, -pairs, -1, dtype=mx.float32)
        frequencies, scale = mx.exp(steps * (math.log(module.base) / pairs)), module.scale
    shape = (-1, 1) if rope.traditional else (1, -1)
    signs = mx.array([-1.0, 1.0]).reshape(shape[::-1])
    step = StepRope(frequencies.reshape(shape), signs, rope.size, rope.traditional, scale, rope.factor)
    mx.eval(step.frequencies, step.signs)
    try:
        check_rope(module, step, rope.size)
    except NotUnderstood:
        return None
    return step
