"""Keys and values in 8 or 4 bits: of a row that reads its prompt, of the rows over slots, and of what is kept.

A token's keys and values are packed when they are written, and attention reads nothing but packed ones, from the first
token on. So a row gives the same tokens alone, in company, in chunks of any length and continued from what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from millstream.backend.generation.caches.batch_caches import RowCaches, new_row
from millstream.backend.generation.caches.slots import SlotCaches, SlotLayer
from millstream.errors import ModelError

GROUPS = (64, 32)
"""Numbers that share a scale and a bias: as many as the size of a head can be cut into."""


@dataclass(frozen=True, slots=True)
class KvPacking:
    bits: int
    group_size: int


def packing_for(model: Any, bits: int) -> KvPacking:
    """Read one token to see the heads. Raises `ModelError` for a model whose caches cannot be quantised."""
    caches = new_row(model)
    for cache in caches:
        if type(cache) is not mlx_cache.KVCache:
            raise refusal(bits, f"{type(cache).__name__} cannot be quantised, only KVCache (full attention) can")
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    sizes = sorted({part.shape[-1] for cache in caches for part in (cache.keys, cache.values)})
    for group_size in GROUPS:
        if all(size % group_size == 0 for size in sizes):
            return KvPacking(bits, group_size)
    named = " and ".join(str(size) for size in sizes)
    raise refusal(bits, f"its heads have {named} numbers, and only multiples of {GROUPS[-1]} can be quantised")


def refusal(bits: int, reason: str) -> ModelError:
    return ModelError(
        f"kv_bits = {bits} does not work for this model: {reason}. "
        "Leave kv_bits away for this model, or set it to 0 in its table of the --config file"
    )


def row_of(model: Any, packing: KvPacking | None) -> RowCaches:
    """Caches for one row; with a packing, of a model that `packing_for` had nothing against."""
    caches = new_row(model)
    if packing is None:
        return caches
    return [mlx_cache.QuantizedKVCache(group_size=packing.group_size, bits=packing.bits) for _ in caches]


class QuantizedSlotLayer(SlotLayer):
    """mlx-lm's attention knows by `bits` and `group_size` that keys and values are triples of packed numbers, scales
    and biases."""

    def __init__(self, packing: KvPacking, slots: SlotCaches) -> None:
        super().__init__(slots)
        self.bits = packing.bits
        self.group_size = packing.group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        parts = self.put((*self._packed(keys), *self._packed(values)))
        return parts[:3], parts[3:]

    def _packed(self, numbers: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(numbers, group_size=self.group_size, bits=self.bits))
