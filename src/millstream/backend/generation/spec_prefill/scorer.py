"""A draft model reads a prompt and tells how important each piece of it is.

A token is important if the last tokens of the prompt, and the first ones that the draft would answer, attend to it. Few
heads look things up and many look at what is near, so the most attentive head of all layers counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches, cache_arrays, new_row_caches
from millstream.backend.generation.caches.own_attention import OwnAttention
from millstream.backend.generation.caches.prompt_caches import preallocate
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.sparse_prompt import GRID

LAST, AHEAD = 16, 8
"""The tokens that are watched: so many at the end of the prompt, and so many of the draft's own answer."""

SMOOTHED = 13
"""Neighbours share their importance: what is looked up is often the token after the one that is recognised."""


class Watch:
    """What the layers of a pass have attended to: for each watched token, the greatest weight of any head."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: of the prompt. Attention to what comes after it does not count."""
        self._tokens = tokens
        self.found: mx.array | None = None

    def see(self, queries: mx.array, keys: mx.array, scale: float, softcap: float | None) -> None:
        _, heads, count, size = queries.shape
        groups, columns = keys.shape[1], keys.shape[2]
        grouped = queries.reshape(1, groups, heads // groups * count, size)
        scores = ((grouped * scale) @ keys.swapaxes(-1, -2)).astype(mx.float32)
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        scores = scores.reshape(heads, count, columns)
        position = columns - count + mx.arange(count)
        scores = mx.where(mx.arange(columns) <= position[:, None], scores, -mx.inf)
        weights = mx.max(mx.softmax(scores, axis=-1), axis=0)[:, : self._tokens]
        self.found = weights if self.found is None else mx.maximum(self.found, weights)


class WatchedLayer(OwnAttention):
    """One layer's cache in a pass that is watched."""

    def __init__(self, cache: Any, watch: Watch) -> None:
        self._cache, self._watch = cache, watch

    def __getattr__(self, name: str) -> Any:
        """All but attention as the cache itself has it."""
        return getattr(self._cache, name)

    def attend(
        self,
        attention: Callable[..., mx.array],
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        **options: Any,
    ) -> mx.array:
        self._watch.see(queries, keys, scale, options.get("softcap"))
        return attention(queries, keys, values, self._cache, scale, mask, **options)


class PromptScorer:
    """Owner only. Reads prompts with the draft model, chunk by chunk, between decode steps."""

    def __init__(self, draft: Any) -> None:
        """`draft`: a model with full attention, whose layers call our attention."""
        self._draft = draft
        self._caches: dict[int, RowCaches] = {}
        self._scored: dict[int, mx.array] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for caches in self._caches.values() for array in cache_arrays(caches))

    def read(self, chunks: Iterable[Prefill]) -> list[list[mx.array]]:
        """Read chunks. Evaluate the arrays it returns, in layer order for each."""
        return [self._read(chunk) for chunk in chunks]

    def take(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """The importance of the pieces of prompts that were read to the end. Waits for the device."""
        found, self._scored = self._scored, {}
        return tuple((request_id, tuple(map(float, each.tolist()))) for request_id, each in found.items())  # type: ignore[arg-type]

    def check(self, tokens: Sequence[int]) -> None:
        """Score a prompt. Raises what the model raises, and `ValueError` if its attention cannot be watched."""
        self.read([Prefill(Generate(0, tuple(tokens), 1), 0, len(tokens), scores=True)])
        self.take()

    def drop(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._caches.pop(request_id, None)
            self._scored.pop(request_id, None)

    def clear(self) -> None:
        self._caches.clear()
        self._scored.clear()

    def _read(self, chunk: Prefill) -> list[mx.array]:
        submit, start, end = chunk.request, chunk.start, chunk.end
        if start == 0:
            caches = self._caches[submit.request_id] = new_row_caches(self._draft)
            preallocate(caches, len(submit.prompt) + AHEAD)
        caches = self._caches[submit.request_id]
        watched = max(start, end - LAST) if end == len(submit.prompt) else end
        if watched > start:
            self._draft(mx.array([submit.prompt[start:watched]], dtype=mx.int32), cache=caches)
        if watched == end:
            return cache_arrays(caches)
        arrays = cache_arrays(caches) if caches[0].keys is not None else []
        scores = self._scored[submit.request_id] = pooled(self._watch(submit, watched, caches))
        del self._caches[submit.request_id]
        return [*arrays, scores]

    def _watch(self, submit: Generate, start: int, caches: RowCaches) -> mx.array:
        """Read the last tokens of a prompt and begin to answer it, and see what that attends to."""
        tokens = mx.array([submit.prompt[start:]], dtype=mx.int32)
        found = []
        for _ in range(1 + AHEAD):
            watch = Watch(len(submit.prompt))
            logits = self._draft(tokens, cache=[WatchedLayer(cache, watch) for cache in caches])
            if watch.found is None:
                raise ValueError("the attention of the draft model cannot be watched")
            found.append(watch.found)
            tokens = mx.argmax(logits[:, -1:], axis=-1)
        return mx.mean(mx.concatenate(found), axis=0)


def pooled(importance: mx.array) -> mx.array:
    """The importance of each piece: of its most important token, once neighbours have shared theirs."""
    padded = mx.pad(importance, (SMOOTHED // 2, SMOOTHED // 2))
    total = mx.pad(mx.cumsum(padded), (1, 0))
    smooth = (total[SMOOTHED:] - total[:-SMOOTHED]) / SMOOTHED
    missing = -smooth.shape[0] % GRID
    return mx.max(mx.pad(smooth, (0, missing)).reshape(-1, GRID), axis=1)
