"""Minimum output lengths: until a row has its `min_tokens`, its stop tokens are not sampled."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millstream.engine.generation.messages import Generate

_SUPPRESSED = -1e9
"""Added to the logits of stop tokens. Far below every logit and every bias, so that the probability becomes 0."""


class MinimumLengths:
    """Built when rows join or leave, called every step; has no state of its own."""

    def __init__(self, rows: Sequence[Generate | None], vocab_size: int) -> None:
        """`vocab_size`: the length of the logits. A tokenizer may have stop tokens beyond it."""
        entries = [
            (index, token, row.min_tokens)
            for index, row in enumerate(rows)
            if row is not None and row.min_tokens
            for token in sorted(row.stop_tokens)
            if token < vocab_size
        ]
        self._any = bool(entries)
        if not entries:
            return
        self._rows = mx.array([row for row, _, _ in entries], dtype=mx.int32)
        self._tokens = mx.array([token for _, token, _ in entries], dtype=mx.int32)
        self._lengths = mx.array([length for _, _, length in entries], dtype=mx.int32)

    def __call__(self, logits: mx.array, positions: mx.array) -> mx.array:
        """`positions` (rows,) counts each row's output tokens."""
        if not self._any:
            return logits
        offsets = mx.where(positions[self._rows] < self._lengths, _SUPPRESSED, 0.0)
        return logits.astype(mx.float32).at[self._rows, self._tokens].add(offsets)
