"""RoPE over few numbers: what MLX's kernel cannot launch on CUDA, and the same numbers without it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from millstream.backend.generation.layers.block_parts import read_rope
from millstream.backend.generation.layers.narrow_rope import can_launch, is_narrow, rotated, use_narrow_rope
from support.ropes import LLAMA3, YARN, Holder


@pytest.mark.parametrize(
    ("shape", "size", "fits"),
    [
        ((16, 32, 1, 64), 16, False),  # Pythia, 16 rows: 8 pairs, then 128 along the last axis
        ((15, 32, 1, 64), 16, True),
        ((16, 32, 2, 64), 16, True),
        ((1, 32, 1, 64), 16, True),
        ((4096, 32, 1, 64), 32, True),
        ((4096, 32, 1, 128), 128, True),
        ((128, 4, 1, 8), 8, False),
        ((64, 4, 1, 8), 8, True),
        ((16, 32, 1, 80), 20, False),  # StableLM: 10 pairs
        ((1, 32, 4096, 64), 16, True),
    ],
)
def test_which_launches_cuda_takes(shape: tuple[int, ...], size: int, fits: bool) -> None:
    assert can_launch(shape, size) is fits
    assert is_narrow(size) or fits


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("rope", "width"),
    [
        (nn.RoPE(16), 64),
        (nn.RoPE(8, traditional=True, scale=0.5), 8),
        (nn.RoPE(20, base=500.0), 80),
        (initialize_rope(16, 1e4, False, LLAMA3, 512), 16),
        (initialize_rope(16, 1e4, False, YARN, 512), 16),
    ],
)
def test_the_numbers_are_those_of_the_module(rope: Any, width: int, tokens: int, dtype: mx.Dtype) -> None:
    x = mx.random.normal((5, 4, tokens, width), key=mx.random.key(1)).astype(dtype)
    limit = 2e-5 if dtype == mx.float32 else 0.02
    read = read_rope(rope)
    assert read is not None
    for offset in (7, mx.array([0, 3, 1000, 17, 5], dtype=mx.int32), mx.array(9)):
        expected, found = rope(x, offset=offset), rotated(x, read, offset)
        assert found.dtype == dtype and found.shape == x.shape
        assert mx.allclose(found.astype(mx.float32), expected.astype(mx.float32), rtol=limit, atol=10 * limit).item()


def test_only_narrow_modules_are_replaced() -> None:
    holder = Holder(nn.RoPE(16), nn.RoPE(64), initialize_rope(8, 1e4, False, LLAMA3, 512), nn.Linear(4, 4))
    kinds = [type(each) for each in holder.ropes]
    assert use_narrow_rope(holder) == 2
    assert [type(each) is kind for each, kind in zip(holder.ropes, kinds, strict=True)] == [False, True, False, True]
    assert all(read_rope(each) is not None for each in holder.ropes[:3]), "fused blocks still know them"


@pytest.mark.parametrize("rows", [8, 300])
def test_a_replaced_module_gives_what_it_gave(rows: int) -> None:
    """On CUDA, MLX's own module fails for 300 rows."""
    holder, x = Holder(nn.RoPE(16)), mx.random.normal((rows, 32, 1, 64), key=mx.random.key(2))
    parts = mx.concatenate([holder.ropes[0](x[row : row + 1], offset=row) for row in range(rows)])
    use_narrow_rope(holder)
    assert mx.allclose(holder.ropes[0](x, offset=mx.arange(rows)), parts, rtol=1e-4, atol=1e-4).item()
