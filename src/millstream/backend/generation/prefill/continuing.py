"""Prompts that continue the same cached prefix, in one padded pass: requests that share a system prompt.

Each has a copy of the prefix in that pass, in caches like those of one row: attention, windows and states of any family
need nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from millstream.backend.generation.caches.widths import MAX_PADDED_CHUNK, padded_chunk_length, padded_group
from millstream.backend.generation.prefill.grouping import group_by_length, length_of
from millstream.backend.generation.prefill.groups import ContinuingGroup, RightPaddedGroup
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.plan import Prefill

COPIED_TOKENS = 16_384
"""Of prefixes, in all rows of a pass together. Beyond, a pass for each prompt takes less memory, and little longer."""

LENGTH_RATIO = 0.5
"""How long the shortest prompt of a pass is at least, relative to the longest."""


class ContinuingPrompts:
    """Owner only. `plain`: for full attention in all layers. `padded`: to usual lengths and numbers of rows. `layers`:
    if passes may be built in parts."""

    def __init__(
        self, model: Any, prefix_store: PrefixStore, *, plain: bool, padded: bool, layers: LayersInParts | None
    ) -> None:
        self._model = model
        self._prefix_store = prefix_store
        self._kind = ContinuingGroup if plain else RightPaddedGroup
        self._padded = padded
        self._layers = layers

    def groups(self, chunks: Sequence[Prefill]) -> list[list[Prefill]]:
        """Those of the chunks that may share passes, by pass."""
        by_prefix: dict[object, list[Prefill]] = {}
        for chunk in chunks:
            cached = bool(chunk.reuse) or chunk.reuse_checkpoint is not None
            if cached and chunk.joins and 0 < length_of(chunk) <= MAX_PADDED_CHUNK:
                by_prefix.setdefault((chunk.start, chunk.reuse, chunk.reuse_checkpoint), []).append(chunk)
        found: list[list[Prefill]] = []
        for same in by_prefix.values():
            most = COPIED_TOKENS // same[0].start
            for group in group_by_length(same, LENGTH_RATIO) if most > 1 else ():
                found += (group[first : first + most] for first in range(0, len(group), most))
        return [group for group in found if len(group) > 1]

    def begin(self, chunks: Sequence[Prefill], *, plain: bool) -> RightPaddedGroup:
        """The pass of such a group. `plain`: whether it may be built in parts."""
        first = chunks[0]
        return self._kind(
            self._model,
            [chunk.request for chunk in chunks],
            padded_chunk_length if self._padded else int,
            padded_group if self._padded else int,
            layers=self._layers if plain else None,
            start=first.start,
            fill=functools.partial(self._prefix_store.fill_caches, first.reuse, first.reuse_checkpoint),
        )
