"""Writes rows into slabs between two steps: those that join, and those that move to another slot."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slabs import Move, RowCache, Slab


class MlxWriter:
    """With MLX's own operations, which copy a slab if running work still reads it."""

    in_place = False

    def finish(self) -> None:
        """MLX knows the order of all writes."""

    def free(self, slab: Slab) -> None:
        """Nothing else holds it."""

    def join(self, rows: Sequence[RowCache], joining: JoiningRows) -> None:
        for index, row in enumerate(rows):
            source_row, stop = joining.source(index)
            at = stop - row.kept
            for first, end in row.runs():
                for parts, new in zip(row.place.layers, joining.layers, strict=True):
                    for part, source in zip(parts, new, strict=True):
                        tokens = source[source_row : source_row + 1, :, at : at + end - first]
                        part[row.slot : row.slot + 1, :, first:end] = tokens
                at += end - first

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if not move.tokens:
                continue
            for old, new in zip(move.source.layers, move.target.layers, strict=True):
                for source, target in zip(old, new, strict=True):
                    tokens = source[move.source_slot : move.source_slot + 1, :, : move.tokens]
                    target[move.target_slot : move.target_slot + 1, :, : move.tokens] = tokens
