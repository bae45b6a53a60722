"""Decode attention over slabs, with MLX's own operations: one call for each slab.

Rows whose first tokens are in the prefix cache also attend to these: all rows that share some read them in one matmul,
and the parts of a row are joined by their maximum and their sum of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.class_caches import SlabLayer
from millstream.backend.generation.caches.flat_caches import FlatCache
from millstream.backend.generation.caches.own_attention import OwnAttention
from millstream.backend.generation.caches.slab_reads import SlabStep
from millstream.backend.layers.capped_attention import cap_scores, capped_attention

Attention = Callable[..., mx.array]
"""mlx-lm's `scaled_dot_product_attention`, or one of ours with its signature. Those that models call take a `softcap`
besides: see `attend_plainly`."""

_FLOOR = -1e30


def slab_attention(plain: Attention) -> Attention:
    """Replaces mlx-lm's function of the same signature. `plain` computes attention over a prompt's own caches, and over
    each slab."""

    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        if isinstance(cache, OwnAttention):
            return cache.attend(attention, queries, keys, values, scale, mask, sinks=sinks, softcap=softcap)
        if isinstance(cache, FlatCache):
            flat = functools.partial(
                attend_plainly, plain, cache=None, scale=scale, mask=cache.prompts.mask(cache.window)
            )
            return cache.attend(flat, queries, keys, values, sinks=sinks, softcap=softcap)
        if not isinstance(cache, SlabLayer):
            return attend_plainly(plain, queries, keys, values, cache, scale, mask, sinks, softcap)
        shape = cache.caches.shape
        keys, values = cache.take_new(keys, values, mask)
        write_step(cache, (shape.grouped(keys), shape.grouped(values)))
        return shape.flattened(over_slabs(plain, shape.grouped(queries), cache, scale, sinks, softcap))

    return attention


def attend_plainly(
    plain: Attention,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """By `plain`, unless scores are capped, which mlx-lm's function cannot do."""
    if softcap is None:
        return plain(queries, keys, values, cache, scale, mask, sinks)
    if not isinstance(keys, mx.array):
        raise ValueError("its attention has a soft cap")
    return capped_attention(queries, keys, values, scale, mask, softcap, sinks)


def write_step(cache: SlabLayer, new: tuple[mx.array, mx.array]) -> None:
    parts = cache.parts_of(new)
    for read in cache.caches.step.reads:
        read.write(cache.index, parts)


def over_slabs(
    plain: Attention,
    queries: mx.array,
    cache: SlabLayer,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of a step's queries over all tokens of their rows. Rows without a slot get the output of another."""
    step = cache.caches.step
    if step.shared:
        return _with_shared(queries, cache, scale, sinks, softcap)
    found = []
    for read in step.reads:
        chosen = queries if read.queries is None else queries[read.queries]
        keys, values = cache.split(read.parts(cache.index))
        found.append(attend_plainly(plain, chosen, keys, values, cache, scale, read.mask, sinks, softcap))
    return _in_order(step, found)


def _in_order(step: SlabStep, found: list[mx.array]) -> mx.array:
    joined = found[0] if len(found) == 1 else mx.concatenate(found)
    return joined if step.order is None else joined[step.order]


def _with_shared(
    queries: mx.array, cache: SlabLayer, scale: float, sinks: mx.array | None, softcap: float | None
) -> mx.array:
    """All parts of all rows, each with its maximum and its sum of weights, then joined."""
    step = cache.caches.step
    heads, length, size = queries.shape[1:]
    own = []
    for read in step.reads:
        chosen = queries if read.queries is None else queries[read.queries]
        own.append(_partial(chosen, *cache.split(read.parts(cache.index)), scale, read.mask, softcap))
    best, total, out = (_in_order(step, [part[index] for part in own]) for index in range(3))
    for shared in step.shared:
        keys, values = cache.split(shared.parts(cache.index))
        count, groups = shared.numbers.shape[0], keys.shape[1]
        chosen = queries[shared.numbers].reshape(count, groups, -1, size).swapaxes(0, 1)
        found = _partial(chosen.reshape(1, heads * count * length, 1, size), keys, values, scale, None, softcap)
        parts = [_by_row(each, count, groups, length) for each in found]
        best, total, out = _join(best, total, out, shared.numbers, parts)
    if sinks is not None:
        top = mx.maximum(best, sinks[None, :, None, None])
        out = out * mx.exp(best - top)
        total = total * mx.exp(best - top) + mx.exp(sinks[None, :, None, None] - top)
    return (out / total).astype(queries.dtype)


def _by_row(part: mx.array, count: int, groups: int, length: int) -> mx.array:
    """From (1, groups * rows * heads of a group * length, 1, any) to (rows, heads, length, any)."""
    size = part.shape[-1]
    return part.reshape(groups, count, -1, size).swapaxes(0, 1).reshape(count, -1, length, size)


def _partial(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    softcap: float | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The greatest score of each query, the sum of its weights, and the weighted sum of values; in float32."""
    rows, heads, length, size = queries.shape
    groups, columns = keys.shape[1], keys.shape[2]
    scores = (queries * scale).reshape(rows, groups, -1, size) @ keys.swapaxes(-1, -2)
    scores = scores.astype(mx.float32)
    if softcap is not None:
        scores = cap_scores(scores, softcap)
    if mask is not None:
        if isinstance(mask, str):
            mask = mx.arange(columns) <= mx.arange(columns - length, columns)[:, None]
        split = scores.reshape(rows, heads, length, columns)
        scores = mx.where(mask, split, _FLOOR).reshape(scores.shape)
    best = mx.max(scores, axis=-1, keepdims=True)
    weights = mx.exp(scores - best)
    out = weights.astype(values.dtype) @ values
    total = mx.sum(weights, axis=-1, keepdims=True)
    return tuple(  # type: ignore[return-value]
        each.astype(mx.float32).reshape(rows, heads, length, -1) for each in (best, total, out)
    )


def _join(
    best: mx.array, total: mx.array, out: mx.array, numbers: mx.array, found: list[mx.array]
) -> tuple[mx.array, mx.array, mx.array]:
    """Add a part to some rows."""
    top = mx.maximum(best[numbers], found[0])
    before, after = mx.exp(best[numbers] - top), mx.exp(found[0] - top)
    sums = total[numbers] * before + found[1] * after
    outs = out[numbers] * before + found[2] * after
    for array, new in ((best, top), (total, sums), (out, outs)):
        array[numbers] = new
    return best, total, out
