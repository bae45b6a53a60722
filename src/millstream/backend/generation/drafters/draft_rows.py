"""The KV caches of a draft model: rows of their own lengths, which run ahead of the text and are taken back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import mlx.core as mx

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.compiled_step import CompiledStep
from millstream.backend.generation.forward_pass import ForwardPass


class DraftRows:
    """Owner only. Rows are named by request ids; every pass computes all of them, and rows that have nothing to run
    keep nothing of it."""

    def __init__(self, forward: ForwardPass, caches: ClassCaches, compiled: CompiledStep | None = None) -> None:
        self._forward = forward
        self._caches = caches
        self._compiled = compiled
        self._ids: list[int | None] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ids

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes

    @property
    def ids(self) -> list[int | None]:
        """By row of a pass; None for one that is vacant."""
        return self._ids

    def join(self, request_ids: Sequence[int], joining: Sequence[JoiningRows]) -> None:
        """Add rows that were prefilled, in the same order."""
        numbers = self._caches.join(joining)
        self._ids += [None] * (self._caches.size - len(self._ids))
        for number, request_id in zip(numbers, request_ids, strict=True):
            self._ids[number] = request_id

    def drop(self, request_ids: Collection[int]) -> None:
        if not any(each in request_ids for each in self._ids if each is not None):
            return
        kept = [number for number, each in enumerate(self._ids) if each is not None and each not in request_ids]
        occupied = set(kept)
        order = self._caches.filter(kept)
        self._ids = [self._ids[number] if number in occupied else None for number in order]

    def take_back(self, lengths: Mapping[int, int]) -> None:
        """End rows after so many tokens. Nothing reads the columns behind a row's end."""
        for request_id, row in zip(self._ids, self._caches.rows, strict=False):
            if request_id is not None and row is not None and request_id in lengths:
                row.length = min(row.length, lengths[request_id])

    def read(self, tokens: Mapping[int, Sequence[int]], length: int) -> mx.array:
        """Run the next tokens of some rows, at most `length` of each. Returns the logits after each row's last one,
        (rows, vocabulary)."""
        size = self._caches.size
        inputs = [[0] * length for _ in range(size)]
        counts, last = [0] * size, [0] * size
        for number, request_id in enumerate(self._ids):
            mine = tokens.get(request_id, ()) if request_id is not None else ()
            inputs[number][: len(mine)] = mine
            counts[number], last[number] = len(mine), max(0, len(mine) - 1)
        if length == 1:
            return self._run(mx.array(inputs, dtype=mx.int32)[:, 0], counts)
        logits = self._run(mx.array(inputs, dtype=mx.int32), counts)
        return mx.take_along_axis(logits, mx.array(last, dtype=mx.int32)[:, None, None], axis=1)[:, 0]

    def step(self, tokens: mx.array, running: Collection[int]) -> mx.array:
        """Run one token of each row, (rows,); the rows of `running` keep it. Returns the logits."""
        return self._run(tokens, [int(each in running) for each in self._ids])

    def _run(self, tokens: mx.array, counts: Sequence[int]) -> mx.array:
        caches = self._caches
        caches.begin_step(1 if tokens.ndim == 1 else tokens.shape[1])
        logits: mx.array | None = None
        if self._compiled is not None:
            logits = self._compiled.run(tokens, caches, {})
        if logits is None:
            plain = tokens.ndim == 1
            logits = self._forward(tokens[:, None] if plain else tokens, cache=caches.layers)
            logits = logits[:, -1, :] if plain else logits
        caches.end_step(counts)
        return logits
