"""Attention layers that compute capped scores themselves, as Gemma 2's do: they get our attention by their structure.

mlx-lm's functions have no capped scores, so such a layer has the formula in its own code, with masks of its own form.
It is recognised by its parts, and checked by its numbers: what differs stays as it is.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from millstream.backend.generation.layers.slab_attention import Attention
from millstream.backend.layers.matmul_reference import join_heads

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rope")
NUMBERS = ("n_heads", "n_kv_heads", "scale", "attn_logit_softcapping")

AGREED = 0.02
"""How far the outputs of a layer may be from its own, relative to their size, in half precision."""


def adopt_capped_layers(model: Any, attend: Attention) -> int:
    """Have such layers call `attend`. Returns how many do."""
    made: dict[type, type] = {}
    adopted = 0
    for _, module in model.named_modules():
        if not _is_capped(module):
            continue
        kind = type(module)
        if isinstance(module, CappedLayer):
            made.setdefault(kind, _with_attention(kind.__bases__[1], attend))
        elif kind not in made:
            made[kind] = _with_attention(kind, attend) if _agrees(model, module, attend) else kind
        module.__class__ = made[kind]
        adopted += isinstance(module, CappedLayer)
    return adopted


def capped_layers(model: Any) -> int:
    """How many layers of a model call our attention with capped scores."""
    return sum(isinstance(module, CappedLayer) for _, module in model.named_modules())


class CappedLayer:
    """An attention layer with capped scores, by our attention."""

    attend: Attention

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return _call(self, type(self).attend, x, mask, cache)


def _with_attention(kind: type, attend: Attention) -> type:
    return type(kind.__name__, (CappedLayer, kind), {"attend": staticmethod(attend)})


def _call(layer: Any, attend: Attention, x: mx.array, mask: Any, cache: Any) -> mx.array:
    rows, length, _ = x.shape
    queries, keys, values = (
        projection(x).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
        for projection, heads in (
            (layer.q_proj, layer.n_heads),
            (layer.k_proj, layer.n_kv_heads),
            (layer.v_proj, layer.n_kv_heads),
        )
    )
    if cache is not None:
        queries, keys = (layer.rope(each, offset=cache.offset) for each in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries, keys = layer.rope(queries), layer.rope(keys)
    cap = layer.attn_logit_softcapping
    out: mx.array = layer.o_proj(
        join_heads(attend(queries, keys, values, cache=cache, scale=layer.scale, mask=mask, softcap=cap))
    )
    return out


def _is_capped(module: Any) -> bool:
    return all(part in module for part in PARTS) and all(hasattr(module, number) for number in NUMBERS)


def _agrees(model: Any, module: Any, attend: Attention) -> bool:
    """Compares a chunk of a few tokens, without a cache, with the layer's own code."""
    size = getattr(getattr(model, "args", None), "hidden_size", None)
    if size is None:
        return False
    x = mx.sin(mx.arange(5 * size) * 0.37).reshape(1, 5, size)
    mask = create_causal_mask(5)
    own, ours = (each.astype(mx.float32) for each in (module(x, mask, None), _call(module, attend, x, mask, None)))
    agreed = own.shape == ours.shape and mx.max(mx.abs(own - ours)) <= AGREED * mx.max(mx.abs(own))
    return bool(agreed)
