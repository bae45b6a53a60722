"""Attention of a decode step by two matmuls equals MLX's own, for every form of mask and number of heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base

from millstream.backend.layers.grouped_attention import grouped_attention

ROWS, COLUMNS, SIZE = 3, 21, 8


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("form", ["bool", "numbers", "none", "by head", "sinks", "two queries"])
def test_it_equals_mlx(heads: int, groups: int, form: str) -> None:
    mx.random.seed(1)
    count = 2 if form == "two queries" else 1
    queries = mx.random.normal((ROWS, heads, count, SIZE))
    keys, values = (mx.random.normal((ROWS, groups, COLUMNS, size)) for size in (SIZE, 5))
    seen: Any = (mx.arange(COLUMNS) < mx.array([21, 7, 1])[:, None])[:, None, None]
    if form == "by head":
        seen = mx.broadcast_to(seen, (ROWS, heads, 1, COLUMNS))
    mask = {"numbers": mx.where(seen, 0.0, -1e30), "none": None}.get(form, seen)
    sinks = mx.random.normal((heads,)) if form == "sinks" else None
    cache = SimpleNamespace()
    ours = grouped_attention(queries, keys, values, cache, 0.3, mask, sinks)
    theirs = base.scaled_dot_product_attention(queries, keys, values, cache, 0.3, mask, sinks)
    assert mx.allclose(ours, theirs, atol=1e-5), mx.abs(ours - theirs).max()
