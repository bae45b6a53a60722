"""A batch of inputs as arrays, padded to one length. Owner only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Padded:
    ids: mx.array
    lengths: mx.array
    keep: mx.array | None
    """True for tokens, False for padding. None if there is none."""
    _counts: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int32]], length: int, pad_token: int) -> Padded:
        ids = np.full((len(rows), length), pad_token, np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        counts = np.array([len(row) for row in rows], np.int32)
        keep = None if counts.min() == length else mx.array(np.arange(length)[None, :] < counts[:, None])
        return cls(mx.array(ids), mx.array(counts), keep, counts)

    def types(self, first_parts: Sequence[int | None]) -> mx.array | None:
        """0 for the tokens of a first text, 1 for those of a second. None if no input has two."""
        if all(part is None for part in first_parts):
            return None
        places = np.arange(self.ids.shape[1])[None, :]
        firsts = np.array([self.ids.shape[1] if part is None else part for part in first_parts])
        second = (places >= firsts[:, None]) & (places < self._counts[:, None])
        return mx.array(second.astype(np.int32))
