"""Rows that join a batch together, as the prefiller hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.slabs import Parts, SharedTokens
from millstream.backend.generation.prefix_store.cache_state import kv_parts


@dataclass(frozen=True, slots=True)
class JoiningRows:
    """Rows that were prefilled together: their parts per layer, right-justified, and the padding columns of each."""

    layers: list[Parts]
    left_padding: tuple[int, ...]
    shared: tuple[SharedTokens, ...] = ()
    """The first tokens of a single row, if it goes on to read them in the prefix cache. `layers` has them too."""

    @property
    def columns(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.layers for part in parts]

    @property
    def count(self) -> int:
        return len(self.left_padding)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(self.columns - padding for padding in self.left_padding)


def joining_row(caches: Sequence[Any], shared: tuple[SharedTokens, ...] = ()) -> JoiningRows:
    """One row that was prefilled into caches of its own."""
    layers = [kv_parts(cache) for cache in caches] if caches[0].keys is not None else []
    return JoiningRows(layers, (0,), shared)
