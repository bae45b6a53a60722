"""M-RoPE: positions in three dimensions (time, height and width), as Qwen's vision models have them.

A text token has the same position in all three. So prefill of text and every decode step use plain RoPE, offset by the
row's own rope delta; only a chunk with media needs a position per dimension.
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
"""The index of a grid's first token in the prompt, and its shape."""


@dataclass(frozen=True, slots=True)
class TextPositions:
    """Consecutive positions from `offset` on: an integer, or an array with one per row."""

    offset: Any


class GridPositions:
    """A position per token and dimension. The layers of one forward pass share the cos and sin tables made of it."""

    def __init__(self, positions: mx.array) -> None:
        self._positions = positions
        self._tables: Any = None

    def tables(self, rotary: Any, like: mx.array) -> Any:
        if self._tables is None:
            self._tables = rotary(like, self._positions)
        return self._tables


class Rotary:
    """Replaces the rotary embedding of a layer."""

    fused_apply = True
    """Tells the model to leave the rotation to its layers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def apply_rotary(
        self, queries: mx.array, keys: mx.array, positions: TextPositions | GridPositions, *, unsqueeze_dim: int
    ) -> tuple[mx.array, mx.array]:
        if isinstance(positions, TextPositions):
            return self._rotate(queries, positions.offset), self._rotate(keys, positions.offset)
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

    def _rotate(self, x: mx.array, offset: Any) -> mx.array:
        return mx.fast.rope(x, self.inner.dim, traditional=False, base=self.inner.base, scale=1.0, offset=offset)


def patch_rotary(layers: Sequence[Any]) -> bool:
    """Replace the rotary embedding of every layer. Returns False if the model has one of an unknown class."""
    attentions = [layer.self_attn for layer in layers]
    if not all(isinstance(attention.rotary_emb, MRoPERotaryEmbedding) for attention in attentions):
        return False
    for attention in attentions:
        attention.rotary_emb = Rotary(attention.rotary_emb)
    return True


def grid_spans(indices: np.ndarray, grid: Grid) -> list[Span]:
    """The grids that the tokens of one media item form: one, or one per frame if there is text between the frames.

    Raises `ValueError` if the number of tokens does not match the grid.
    """
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    frames, rows, columns = grid
    shape = (frames, rows, columns) if len(runs) == 1 else (1, rows, columns)
    if any(len(run) != shape[0] * rows * columns for run in runs):
        raise ValueError(f"a grid of {frames} x {rows} x {columns} has {len(indices)} tokens in the prompt")
    return [(int(run[0]), shape) for run in runs]


def mrope_positions(length: int, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """Returns the positions of all tokens of a prompt, (3, length), and the rope delta: the difference between the
    position after the prompt and its length."""
    positions = np.empty((3, length), dtype=np.int32)
    done = position = 0
    for start, (frames, rows, columns) in spans:
        positions[:, done:start] = position + np.arange(start - done)
        position += start - done
        done = start + frames * rows * columns
        positions[:, start:done] = position + np.indices((frames, rows, columns)).reshape(3, -1)
        position += max(frames, rows, columns)
    positions[:, done:] = position + np.arange(length - done)
    return positions, position - done
