"""RoPE over few numbers: what MLX's kernel cannot launch on CUDA, and the same numbers without it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.layers.block_parts import read_rope
from millstream.backend.layers.narrow_rope import NarrowRoPE, can_launch, is_narrow, rotated, use_narrow_rope


class Holder(nn.Module):  # type: ignore[misc]
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.ropes = [nn.RoPE(size) for size in sizes]


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
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("size", "width"), [(16, 64), (8, 8), (20, 80)])
@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (3, 0.5)])
def test_the_numbers_are_those_of_mlx(
    size: int, width: int, traditional: bool, dtype: mx.Dtype, tokens: int, scale: float
) -> None:
    x = mx.random.normal((5, 4, tokens, width), key=mx.random.key(1)).astype(dtype)
    limit = 2e-5 if dtype == mx.float32 else 0.02
    for offset in (7, mx.array([0, 3, 1000, 17, 5], dtype=mx.int32), mx.array(9)):
        expected = mx.fast.rope(x, size, traditional=traditional, base=1e4, scale=scale, offset=offset)
        found = rotated(x, size, offset, traditional=traditional, base=1e4, scale=scale)
        assert found.dtype == dtype and found.shape == x.shape
        assert mx.allclose(found.astype(mx.float32), expected.astype(mx.float32), rtol=limit, atol=10 * limit).item()


def test_only_narrow_modules_are_replaced() -> None:
    holder = Holder(16, 64, 8)
    assert use_narrow_rope(holder) == 2
    assert [type(each) for each in holder.ropes] == [NarrowRoPE, nn.RoPE, NarrowRoPE]
    assert read_rope(holder.ropes[0]) is not None, "fused blocks still know it"


@pytest.mark.parametrize("rows", [8, 300])
def test_a_replaced_module_gives_what_it_gave(rows: int) -> None:
    """On CUDA, MLX's own module fails for 300 rows."""
    holder, x = Holder(16), mx.random.normal((rows, 32, 1, 64), key=mx.random.key(2))
    offset = mx.arange(rows, dtype=mx.int32)
    parts = [holder.ropes[0](x[row : row + 1], int(row)) for row in range(rows)]
    use_narrow_rope(holder)
    limit = 1e-5 if current_device().is_cpu else 1e-4
    assert mx.allclose(holder.ropes[0](x, offset), mx.concatenate(parts), rtol=limit, atol=limit).item()
