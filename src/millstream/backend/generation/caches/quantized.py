"""Quantised KV cache, 8 or 4 bits: for prompts in prefill, for slabs and for the prefix cache.

Keys and values are quantised when they are written, and attention reads only quantised ones, from the first token on.
So a row gives the same tokens alone, in a batch, with chunks of any length and continued from the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from millstream.backend.generation.caches.batch_caches import RowCaches, new_row_caches
from millstream.backend.generation.caches.class_caches import ClassCaches, SlabLayer
from millstream.backend.generation.caches.slabs import Parts
from millstream.backend.kernels.decode_attention import Packing
from millstream.errors import ModelError

GROUP_SIZES = (64, 32)
"""How many elements may share a scale and a bias, best first. The head size must be a multiple."""


@dataclass(frozen=True, slots=True)
class KvQuantization:
    bits: int
    group_size: int


def choose_quantization(model: Any, bits: int) -> KvQuantization:
    """Run one token to find the head sizes. Raises `ModelError` if the model's caches cannot be quantised."""
    caches = new_row_caches(model)
    for cache in caches:
        if type(cache) is not mlx_cache.KVCache:
            raise unsupported(bits, f"{type(cache).__name__} cannot be quantised, only KVCache (full attention) can")
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    sizes = sorted({part.shape[-1] for cache in caches for part in (cache.keys, cache.values)})
    for group_size in GROUP_SIZES:
        if all(size % group_size == 0 for size in sizes):
            return KvQuantization(bits, group_size)
    listed = " and ".join(str(size) for size in sizes)
    raise unsupported(bits, f"its head size is {listed}, and only multiples of {GROUP_SIZES[-1]} can be quantised")


def unsupported(bits: int, reason: str) -> ModelError:
    return ModelError(
        f"kv_bits = {bits} does not work for this model: {reason}. "
        "Leave out kv_bits for this model, or set it to 0 in the model's table of the --config file"
    )


def new_prompt_caches(model: Any, quantization: KvQuantization | None) -> RowCaches:
    """Empty caches for one row, quantised if `choose_quantization` returned a quantisation for the model."""
    caches = new_row_caches(model)
    if quantization is None:
        return caches
    return [mlx_cache.QuantizedKVCache(group_size=quantization.group_size, bits=quantization.bits) for _ in caches]


class QuantizedSlabLayer(SlabLayer):
    """One layer of quantised slabs. mlx-lm's attention tells by `bits` and `group_size` that keys and values are
    triples of packed weights, scales and biases."""

    def __init__(self, quantization: KvQuantization, caches: ClassCaches, index: int) -> None:
        super().__init__(caches, index)
        self.packing = Packing(quantization.bits, quantization.group_size)
        self.bits = quantization.bits
        self.group_size = quantization.group_size

    def parts_of(self, new: tuple[mx.array, mx.array]) -> Parts:
        return (*self._quantize(new[0]), *self._quantize(new[1]))

    def split(self, parts: Parts) -> tuple[Any, Any]:
        return parts[:3], parts[3:]

    def _quantize(self, array: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array, group_size=self.group_size, bits=self.bits))
