"""RoPE over few numbers of each head, on CUDA: MLX 0.32.4 cannot launch its kernel for many rows of one token.

A block of its kernel has up to 1,024 threads: as many as there are pairs, then tokens of a row, then heads of all rows.
With up to 15 pairs and one token per row that is 128 and more along the last axis, where CUDA allows 64. The launch
fails with "invalid argument" from 16 rows of 32 heads on: models that rotate a quarter of small heads (Pythia,
StableLM) would lose their engine. Such calls are computed by plain operations here, all others by MLX.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx

from millstream.backend.generation.layers.block_parts import Rope, read_rope

MOST_THREADS, MOST_ALONG_Z = 1024, 64
HEADS_PER_THREAD = 4
"""Of MLX's kernel."""


def use_narrow_rope(model: Any) -> int:
    """Have the rotary embeddings of a model that rotate few numbers do it so. Returns how many there are."""
    count = 0
    for _, module in model.named_modules():
        if "rope" in type(module).__name__.lower() and (rope := read_rope(module)) is not None and is_narrow(rope.size):
            kind: Any = type(module)
            module._narrow = rope
            module.__class__ = _narrow_class(kind)
            count += 1
    return count


@functools.cache
def _narrow_class(kind: Any) -> type:
    """A subclass of a rotary embedding that MLX's kernel is not always asked for."""

    def call(self: Any, x: mx.array, offset: int | mx.array = 0, **named: Any) -> mx.array:
        if named or can_launch(x.shape, self._narrow.size):
            out: mx.array = kind.__call__(self, x, offset, **named)
            return out
        return rotated(x, self._narrow, offset)

    return type(kind.__name__, (kind,), {"__call__": call})


def is_narrow(size: int) -> bool:
    """True if there are too few pairs for a block of many rows of one token."""
    return _power_below(size // 2) * MOST_ALONG_Z < MOST_THREADS


def can_launch(shape: tuple[int, ...], size: int) -> bool:
    """Whether MLX's kernel takes heads of this shape, (rows, heads, tokens, numbers), of which it rotates `size`."""
    heads = -(-math.prod(shape[1:-2]) // HEADS_PER_THREAD)
    # Its blocks grow by doubling each side in turn, as long as that axis is long enough for it.
    sides, axes = [1, 1, 1], (size // 2, shape[-2], shape[0] * heads)
    threads, grown = 1, True
    while grown:
        grown = False
        for axis, length in enumerate(axes):
            if threads < MOST_THREADS and length >= 2 * sides[axis]:
                sides[axis] *= 2
                threads *= 2
                grown = True
    return sides[2] <= MOST_ALONG_Z


def rotated(x: mx.array, rope: Rope, offset: int | mx.array) -> mx.array:
    """What a rotary embedding gives. `offset`: the position of the first token, of each row or of all."""
    tokens = mx.arange(x.shape[-2], dtype=mx.float32)
    starts = mx.array(offset, dtype=mx.float32).reshape(-1, *[1] * (x.ndim - 1))
    angles = (starts + tokens[:, None]) / rope.periods
    cosines, sines = mx.cos(angles), mx.sin(angles)
    turned, rest = x[..., : rope.size].astype(mx.float32) * rope.factor, x[..., rope.size :]
    if rope.traditional:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = mx.split(turned, 2, axis=-1)
    pairs = [first * cosines - second * sines, first * sines + second * cosines]
    joined = mx.stack(pairs, axis=-1).reshape(turned.shape) if rope.traditional else mx.concatenate(pairs, axis=-1)
    return mx.concatenate([joined.astype(x.dtype), rest], axis=-1) if rest.size else joined.astype(x.dtype)


def _power_below(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << (max(1, number).bit_length() - 1)
