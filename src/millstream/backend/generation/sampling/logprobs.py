"""Log-probabilities of sampled tokens, computed only for rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from millstream.types import TokenLogprob


class RowLogprobs:
    """Computes the log-probabilities of a step. Built when rows join or leave, called every step."""

    def __init__(self, wanted: Sequence[int | None]) -> None:
        """`wanted`: per row, how many of the most likely tokens to return, or None for no log-probabilities."""
        self._wanted = {index: top for index, top in enumerate(wanted) if top is not None}
        if not self._wanted:
            return
        self._indices = mx.array(list(self._wanted), dtype=mx.int32)
        self._max_top = max(self._wanted.values(), default=0)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def __call__(self, logits: mx.array, tokens: mx.array) -> PendingLogprobs:
        """From the model's own distribution: before bias, penalties and temperature."""
        rows = logits[self._indices].astype(mx.float32)
        logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        sampled = mx.take_along_axis(logprobs, tokens[self._indices][:, None], axis=-1)
        if self._max_top == 0:
            return PendingLogprobs(self._wanted, [sampled])
        best = mx.argpartition(-logprobs, kth=self._max_top - 1, axis=-1)[:, : self._max_top]
        return PendingLogprobs(self._wanted, [sampled, best, mx.take_along_axis(logprobs, best, axis=-1)])


class PendingLogprobs:
    """Log-probabilities of a launched step: evaluate `arrays` with the step, then call `read`."""

    def __init__(self, wanted: dict[int, int], arrays: list[mx.array]) -> None:
        self._wanted = wanted
        self.arrays = arrays

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Wait for the step. Returns the log-probabilities by the row's index in the batch."""
        sampled, *rest = (cast(Any, array.tolist()) for array in self.arrays)
        result = {}
        for number, (index, top) in enumerate(self._wanted.items()):
            best: tuple[tuple[int, float], ...] = ()
            if rest and top:
                best = tuple(
                    sorted(zip(rest[0][number], rest[1][number], strict=True), key=lambda pair: -pair[1])[:top]
                )
            result[index] = TokenLogprob(tokens[index], sampled[number][0], best)
        return result
