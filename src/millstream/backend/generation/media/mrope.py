"""Positions in three dimensions, as Qwen's vision models have them: time, height and width.

A text token has the same place in all three, so whatever reads text, and every decode step, rotates as any other model
does, by the row's own shift further. Only a chunk with an image inside needs a place for each dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding, apply_multimodal_rotary_pos_emb

Grid = tuple[int, int, int]
"""Frames, rows and columns of tokens."""

Span = tuple[int, Grid]
"""Where a grid of tokens begins, and its shape."""


@dataclass(frozen=True, slots=True)
class Line:
    """Places one after the other, from `offset` on: a number, or one for each row."""

    offset: Any


class Grids:
    """A place for each token and dimension. The layers of one pass share the tables that are made of it."""

    def __init__(self, places: mx.array) -> None:
        self._places = places
        self._tables: Any = None

    def tables(self, rotary: Any, like: mx.array) -> Any:
        if self._tables is None:
            self._tables = rotary(like, self._places)
        return self._tables


class Rotary:
    """Stands where a layer's rotary embedding stood."""

    fused_apply = True
    """So that a model leaves it to its layers to ask for the rotation."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def apply_rotary(
        self, queries: mx.array, keys: mx.array, positions: Line | Grids, *, unsqueeze_dim: int
    ) -> tuple[mx.array, mx.array]:
        if isinstance(positions, Line):
            return self._turned(queries, positions.offset), self._turned(keys, positions.offset)
        cos, sin = positions.tables(self.inner, keys)
        rotated: tuple[mx.array, mx.array] = apply_multimodal_rotary_pos_emb(
            queries,
            keys,
            cos,
            sin,
            mrope_section=self.inner.mrope_section,
            unsqueeze_dim=unsqueeze_dim,
            style=self.inner.style,
        )
        return rotated

    def _turned(self, x: mx.array, offset: Any) -> mx.array:
        return mx.fast.rope(x, self.inner.dim, traditional=False, base=self.inner.base, scale=1.0, offset=offset)


def adopt_rotary(layers: Sequence[Any]) -> bool:
    """Give every layer our rotation; False if this model turns otherwise than is known here."""
    attentions = [layer.self_attn for layer in layers]
    if not all(isinstance(attention.rotary_emb, MRoPERotaryEmbedding) for attention in attentions):
        return False
    for attention in attentions:
        attention.rotary_emb = Rotary(attention.rotary_emb)
    return True


def spans_of(places: np.ndarray, grid: Grid) -> list[Span]:
    """The grids that a media's tokens form: one, or one for each frame where text stands between them."""
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    frames, rows, columns = grid
    shape = (frames, rows, columns) if len(runs) == 1 else (1, rows, columns)
    if any(len(run) != shape[0] * rows * columns for run in runs):
        raise ValueError(f"a grid of {frames} x {rows} x {columns} has {len(places)} tokens in the prompt")
    return [(int(run[0]), shape) for run in runs]


def lay_out(length: int, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """Places of all tokens of a prompt, (3, length), and how much further than its token count a row goes on."""
    places = np.empty((3, length), dtype=np.int32)
    done = ahead = 0
    for start, (frames, rows, columns) in spans:
        places[:, done:start] = ahead + np.arange(start - done)
        ahead += start - done
        done = start + frames * rows * columns
        places[:, start:done] = ahead + np.indices((frames, rows, columns)).reshape(3, -1)
        ahead += max(frames, rows, columns)
    places[:, done:] = ahead + np.arange(length - done)
    return places, ahead - done
