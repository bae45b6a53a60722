"""Reads some spans of a prompt in one forward pass, each at its true positions.

mlx-lm's layers rotate all tokens of a row from one position on, but each row may have its own. So the spans are cut
into pieces, and the pieces are the rows of a pass. Attention and the caches see them joined, as one row: keys have
their position in them, so causal attention over columns in order is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.caches.own_attention import OwnAttention
from millstream.engine.generation.sparse_prompt import GRID, length

MASK = "causal"


class Fold:
    """The pieces of a pass: rows of `width` tokens. Those of a row that is not full are followed by padding."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.width = spans[0][1] - spans[0][0] if len(spans) == 1 else GRID
        self.pieces = [
            (start, min(beyond, start + self.width))
            for first, beyond in spans
            for start in range(first, beyond, self.width)
        ]
        self.offset = mx.array([start for start, _ in self.pieces], dtype=mx.int32)
        self._tokens: mx.array | None = None
        """Where the tokens are among all columns; None if there is no padding."""
        self._columns: mx.array | None = None
        """The token of each column; any token for padding."""
        if length(spans) < self.width * len(self.pieces):
            tokens = [
                number * self.width + index
                for number, (start, beyond) in enumerate(self.pieces)
                for index in range(beyond - start)
            ]
            columns = [0] * (self.width * len(self.pieces))
            for token, column in enumerate(tokens):
                columns[column] = token
            self._tokens, self._columns = mx.array(tokens), mx.array(columns)

    def tokens_of(self, prompt: Sequence[int]) -> mx.array:
        padded = [[*prompt[start:beyond], *[0] * (self.width - beyond + start)] for start, beyond in self.pieces]
        return mx.array(padded, dtype=mx.int32)

    def join(self, part: mx.array) -> mx.array:
        """From (pieces, heads, width, size) to (1, heads, tokens, size)."""
        joined = part.swapaxes(0, 1).reshape(1, part.shape[1], -1, part.shape[3])
        return joined if self._tokens is None else joined[:, :, self._tokens]

    def split(self, part: mx.array) -> mx.array:
        """And back."""
        whole = part if self._columns is None else part[:, :, self._columns]
        return whole.reshape(part.shape[1], len(self.pieces), self.width, part.shape[3]).swapaxes(0, 1)


class FoldedLayer(OwnAttention):
    """One layer's cache during such a pass: writes the joined pieces to the prompt's own cache."""

    def __init__(self, cache: Any, fold: Fold) -> None:
        self._cache, self._fold = cache, fold
        self._fetched: tuple[Any, Any] | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each piece."""
        return self._fold.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str:
        """Stands for what `attend` does. Raises `ValueError` if a layer wants a window."""
        if window_size is not None:
            raise ValueError("its layers do not attend to all tokens of their cache")
        return MASK

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._fetched = self._cache.update_and_fetch(self._fold.join(keys), self._fold.join(values))
        return self._fetched

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
        """Raises `ValueError` if a layer passes on other keys and values, or a mask of its own."""
        fetched, self._fetched = self._fetched, None
        if fetched is None or keys is not fetched[0] or values is not fetched[1] or mask is not MASK:
            raise ValueError("its layers do not pass the keys and values of the cache on to attention")
        joined = self._fold.join(queries)
        seen = None if joined.shape[2] == 1 else MASK
        return self._fold.split(attention(joined, keys, values, self._cache, scale, seen, **options))


def read_spans(model: Any, prompt: Sequence[int], spans: Sequence[tuple[int, int]], caches: RowCaches) -> None:
    """Prefill these spans of a prompt. Computes nothing yet: evaluate the caches' arrays."""
    fold = Fold(spans)
    model(fold.tokens_of(prompt), cache=[FoldedLayer(cache, fold) for cache in caches])
