"""Reads what the inputs of a batch have in common once: the instruction of an embedding model, the query of a reranker.
Owner only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

MIN_TOKENS = 32
"""A shorter prefix is not worth a pass of its own."""

Rows = list[NDArray[np.int32]]


class PrefixReader:
    """Keeps the keys and values of the last prefix: the next batch of a request, and often the next request, has the
    same one. For language models whose layers all have a plain KV cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        self._states: list[tuple[mx.array, mx.array]] = []

    @staticmethod
    def serves(model: Any) -> bool:
        return all(type(cache) is KVCache for cache in make_prompt_cache(model))

    def common(self, rows: Rows) -> int:
        """How many tokens at the beginning of all rows are worth reading once; 0 for none. Each row keeps one."""
        shortest = min(map(len, rows)) - 1
        first = rows[0][:shortest]
        length = shortest
        for row in rows[1:]:
            differs = np.nonzero(first[:length] != row[:length])[0]
            length = int(differs[0]) if len(differs) else length
        known = len(self._tokens)
        if MIN_TOKENS <= known <= length and np.array_equal(first[:known], self._tokens):
            return known
        return length if length >= MIN_TOKENS and len(rows) > 1 else 0

    def continued(self, prefix: NDArray[np.int32], ids: mx.array) -> mx.array:
        """The hidden states of rows that follow the prefix."""
        if not np.array_equal(prefix, self._tokens):
            self._read(prefix)
        hidden: mx.array = self._model.model(ids, cache=self._caches(ids.shape[0]))
        return hidden

    def _caches(self, rows: int) -> list[KVCache]:
        """KV caches for so many rows that have read the prefix."""
        caches = []
        for keys, values in self._states:
            cache = KVCache()
            cache.keys, cache.values = (mx.broadcast_to(part, (rows, *part.shape[1:])) for part in (keys, values))
            cache.offset = len(self._tokens)
            caches.append(cache)
        return caches

    def clear(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._states = []

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for state in self._states for part in state)

    def _read(self, prefix: NDArray[np.int32]) -> None:
        caches = make_prompt_cache(self._model)
        self._model.model(mx.array(prefix)[None], cache=caches)
        length = len(prefix)
        self._states = [(cache.keys[..., :length, :], cache.values[..., :length, :]) for cache in caches]
        mx.eval(self._states)
        self._tokens = prefix.copy()
