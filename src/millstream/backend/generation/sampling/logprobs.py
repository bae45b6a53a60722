"""Log-probabilities for the rows that ask, and for no other row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from millstream.types import TokenLogprob


class LogprobProbe:
    """`wanted` holds None for a row that does not ask, else how many of the most likely tokens it wants."""

    def __init__(self, wanted: Sequence[int | None]) -> None:
        self._wanted = {place: top for place, top in enumerate(wanted) if top is not None}
        self._places = mx.array(list(self._wanted), dtype=mx.int32)
        self._most = max(self._wanted.values(), default=0)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def __call__(self, logits: mx.array, tokens: mx.array) -> LogprobReading:
        """Of the model's own distribution: before bias, penalties and temperature."""
        chosen = logits[self._places].astype(mx.float32)
        chosen = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        picked = mx.take_along_axis(chosen, tokens[self._places][:, None], axis=-1)
        if self._most == 0:
            return LogprobReading(self._wanted, [picked])
        best = mx.argpartition(-chosen, kth=self._most - 1, axis=-1)[:, : self._most]
        return LogprobReading(self._wanted, [picked, best, mx.take_along_axis(chosen, best, axis=-1)])


class LogprobReading:
    """Arrays on their way: evaluate `arrays` with the step, then `read`."""

    def __init__(self, wanted: dict[int, int], arrays: list[mx.array]) -> None:
        self._wanted = wanted
        self.arrays = arrays

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """By place in the batch. Waits for the step."""
        picked, *rest = (cast(Any, array.tolist()) for array in self.arrays)
        result = {}
        for index, (place, top) in enumerate(self._wanted.items()):
            best: tuple[tuple[int, float], ...] = ()
            if rest and top:
                best = tuple(sorted(zip(rest[0][index], rest[1][index], strict=True), key=lambda pair: -pair[1])[:top])
            result[place] = TokenLogprob(tokens[place], picked[index][0], best)
        return result
