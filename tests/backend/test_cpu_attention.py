"""Our attention and exponential for x86_64 CPUs, against MLX's own. They are plain MLX, so they run everywhere."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.prompt_caches import preallocate, reset_growth
from millstream.backend.layers.cpu_attention import MANY_PAIRS, cpu_attention
from millstream.backend.layers.vector_math import LARGE, exp_in_place, exp_polynomial


@pytest.mark.parametrize("size", [10, LARGE + 1])
def test_the_exponential_is_exact_near_0_and_good_to_5_digits_everywhere(size: int) -> None:
    x = np.concatenate([np.linspace(-85, 85, size - 3), [-1e30, 0.0, 1.0]]).astype(np.float32)
    for ours in (exp_polynomial(mx.array(x)), exp_in_place(mx.array(x) * 1)):
        exact = np.exp(x.astype(np.float64))
        error = np.abs(np.array(ours) - exact) / np.maximum(exact, 1e-30)
        assert error.max() < 1e-5
        assert error[np.abs(x) <= 1].max() < 4e-7


def test_memory_that_is_not_all_its_own_is_not_written_over() -> None:
    rows = mx.array([[0.5], [1.0]])
    wide = mx.broadcast_to(rows, (2, LARGE))
    assert mx.allclose(exp_in_place(wide)[:, -1], mx.exp(rows[:, 0]), rtol=1e-6)
    assert rows.tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize("kind", ["none", "causal", "padded"])
@pytest.mark.parametrize("pairs", [MANY_PAIRS, LARGE])
def test_it_is_the_attention_that_mlx_computes(groups: int, count: int, kind: str, pairs: int) -> None:
    rows, heads, size = 3, 4, 16
    length = max(count, -(-pairs // (rows * heads * count)))
    mx.random.seed(count)
    queries = mx.random.normal((rows, heads, count, size))
    buffers = mx.random.normal((2, rows, groups, length + 5, size))
    keys, values = buffers[0][..., :length, :], buffers[1][..., :length, :]
    mask: Any = None if kind == "none" else kind
    if kind == "padded":
        left = mx.array([0, length // 2, 1])[:, None, None, None]
        places = mx.arange(length)
        mask = (places <= mx.arange(length - count, length)[:, None]) & (places >= left)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert rows * heads * count * length >= pairs, "it is left to MLX"
    ours = cpu_attention(queries, keys, values, None, 0.25, mask)
    seen = mx.ones(expected.shape, dtype=mx.bool_)
    if kind == "padded":  # a query of the padding sees nothing, and nobody reads it
        seen = mx.broadcast_to(mask.any(axis=-1, keepdims=True), expected.shape)
    assert mx.abs(mx.where(seen, ours - expected, 0)).max().item() < 2e-6
    assert not mx.isnan(ours).any().item()


def test_a_prompts_cache_is_made_once_and_grows_as_usual_afterwards() -> None:
    cache = KVCache()
    preallocate([cache], 700)
    piece = mx.zeros((1, 2, 300, 4))
    cache.update_and_fetch(piece, piece)
    assert cache.keys.shape[2] == 768
    cache.update_and_fetch(piece, piece)
    assert cache.keys.shape[2] == 768, "no copy for the second chunk"
    reset_growth([cache])
    cache.update_and_fetch(piece, piece)
    assert (cache.offset, cache.keys.shape[2]) == (900, 600 + 512)
