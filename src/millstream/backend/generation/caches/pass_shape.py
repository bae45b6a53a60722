"""The shape of a forward pass of decoding rows: how many of them, and how many tokens of each.

A pass of several tokens per row, which verifies drafts, runs *flat*: in the model each token is a row of its own, token
j of row number n in flat row n * length + j. So linear layers, mixtures of experts, rotary embeddings and fused blocks
are those of a plain step, at the width that all of its tokens need together. Only attention and recurrent layers know
which flat rows belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class PassShape:
    live: int
    """Row numbers of the pass: 0 to `live` - 1, some of which may be vacant."""
    width: int
    """Flat rows, including those that pad it."""
    length: int = 1
    """Tokens per row."""

    @property
    def rows(self) -> int:
        """Rows that cover the width: the last ones are vacant, and the last of them may be cut."""
        return -(-self.width // self.length)

    def flat(self, tokens: mx.array) -> mx.array:
        """The tokens of rows, (rows, length), as flat rows."""
        tokens = tokens[: self.live].reshape(-1)
        return _padded(tokens, self.width)

    def by_row(self, x: mx.array, size: int) -> mx.array:
        """An output, (flat rows, 1, …), as (size, length, …). Rows that are not in the pass get zeros."""
        found = x[: self.live * self.length].reshape(self.live, self.length, *x.shape[2:])
        return _padded(found, size)

    def flat_rows(self, x: mx.array) -> mx.array:
        """An output of rows, (live rows, length, …), as flat rows, (flat rows, 1, …)."""
        return _padded(x.reshape(self.live * self.length, 1, *x.shape[2:]), self.width)

    def grouped(self, x: mx.array) -> mx.array:
        """Heads of flat rows, (flat rows, heads, 1, size), as (rows, heads, length, size)."""
        if self.length == 1:
            return x
        heads, size = x.shape[1], x.shape[3]
        return _padded(x, self.rows * self.length).reshape(self.rows, self.length, heads, size).swapaxes(1, 2)

    def flattened(self, x: mx.array) -> mx.array:
        """The opposite of `grouped`."""
        if self.length == 1:
            return x
        heads, size = x.shape[1], x.shape[3]
        return x.swapaxes(1, 2).reshape(-1, heads, 1, size)[: self.width]


def _padded(array: mx.array, rows: int) -> mx.array:
    """With zeros for rows that are missing, at most `rows` of them."""
    missing = rows - array.shape[0]
    if missing <= 0:
        return array[:rows] if missing else array
    return mx.concatenate([array, mx.zeros((missing, *array.shape[1:]), dtype=array.dtype)])
