"""Attention for models in which layers share the keys and values of an earlier one, as Gemma 3n and Gemma 4 do.

Such a layer has no cache: it passes on the arrays that the earlier layer got from its own. Over slabs these are only
the tokens of a step, so the earlier layer's cache is found by them.
"""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.class_caches import SlabLayer
from millstream.backend.generation.layers.slab_attention import Attention


def with_shared_layers(attend: Attention) -> Attention:
    """Replaces mlx-lm's function of the same signature, for one model."""
    seen: dict[tuple[int, int], weakref.ref[SlabLayer]] = {}
    """By window and index, the layers that attended last. The slabs of a batch that is gone are not held."""

    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if isinstance(cache, SlabLayer):
            seen[cache.caches.window, cache.index] = weakref.ref(cache)
        elif cache is None:
            cache = _owner(seen, keys)
        return attend(queries, keys, values, cache, scale, mask, sinks, **options)

    return attention


def _owner(seen: dict[tuple[int, int], weakref.ref[SlabLayer]], keys: Any) -> SlabLayer | None:
    """The layer that wrote these keys in this step."""
    for reference in seen.values():
        layer = reference()
        if layer is not None and layer.state is not None and layer.state[0] is keys:
            return layer
    return None
