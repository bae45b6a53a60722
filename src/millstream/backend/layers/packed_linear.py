"""Quantised linear layers and embeddings whose matmuls go through `packed_products`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.kernels import packed_tilings
from millstream.backend.layers import matmul_choice, packed_choice
from millstream.backend.layers.packed_products import packed_weight, product


class PackedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, packed_weight(self))
        return out + self["bias"] if "bias" in self else out


class PackedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, packed_weight(self))


_KINDS: dict[type, type] = {nn.QuantizedLinear: PackedLinear, nn.QuantizedEmbedding: PackedEmbedding}


def use_packed_products(layers: list[Any]) -> int:
    """Have those layers that the kernels take use them. Returns how many did not before."""
    changed = 0
    for layer in layers:
        if type(layer) in _KINDS and packed_tilings.fits(packed_weight(layer)):
            layer.__class__ = _KINDS[type(layer)]
            changed += 1
            weight = packed_weight(layer)
            matmul_choice.tune_shape(weight, matmul_choice.shape_seconds)
            packed_choice.tune_groups("matmul", weight, matmul_choice.seconds, packed_choice.agrees)
    return changed
