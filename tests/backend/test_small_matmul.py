"""The CUDA kernels for small-batch matmuls against their MLX reference. Skipped where there is no CUDA."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.layers.fused_blocks import SmallMatmulLinear
from millstream.backend.kernels import small_matmul
from millstream.backend.kernels.small_matmul import MAX_WEIGHT_ROWS, WIDTHS
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX

on_cuda = pytest.mark.skipif(
    current_device().kind != "cuda", reason="compiles CUDA kernels: needs MLX's CUDA build and an NVIDIA GPU"
)
# Compiling a case takes seconds.


def random(*shape: int, dtype: mx.Dtype, scale: float = 0.3) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


def close(got: mx.array, expected: mx.array) -> None:
    """Within what rounding to the type of the rows can do, twice."""
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    assert not mx.isnan(got).any().item()
    assert mx.abs(got - expected).max().item() <= 0.02 * max(1.0, mx.abs(expected).max().item())


def wide(*arrays: mx.array) -> list[mx.array]:
    return [array.astype(mx.float32) for array in arrays]


@on_cuda
@pytest.mark.parametrize(
    ("count", "size", "rows", "dtype"),
    [
        (64, 96, 32, mx.bfloat16),
        (4096, 576, 32, mx.float16),
        (4096, 576, 64, mx.bfloat16),
        (2048, 8192, 32, mx.bfloat16),
        (2048, 2048, 64, mx.float16),
    ],
)
def test_matmuls(count: int, size: int, rows: int, dtype: mx.Dtype) -> None:
    mx.random.seed(rows)
    weight = random(count, size, dtype=dtype, scale=size**-0.5)
    x, residual = random(rows, 1, size, dtype=dtype), random(rows, 1, count, dtype=dtype)
    close(BY_KERNELS.matmul(x, weight), BY_MLX.matmul(*wide(x, weight)))
    close(BY_KERNELS.matmul_add(x, weight, residual), BY_MLX.matmul_add(*wide(x, weight, residual)))
    close(BY_KERNELS.glu(x, weight), BY_MLX.glu(*wide(x, weight)))


@on_cuda
@pytest.mark.parametrize(
    ("heads", "groups", "head", "rows", "dtype"),
    [(9, 3, 64, 32, mx.bfloat16), (4, 4, 128, 64, mx.bfloat16), (3, 1, 96, 32, mx.float16)],
)
def test_projections_with_rope(heads: int, groups: int, head: int, rows: int, dtype: mx.Dtype) -> None:
    mx.random.seed(rows)
    x = random(rows, 1, 576, dtype=dtype)
    weight = random((heads + 2 * groups) * head, 576, dtype=dtype, scale=0.05)
    offset = mx.random.randint(0, 3000, (rows,)).astype(mx.int32)
    periods = 10000.0 ** (mx.arange(0, head, 2, dtype=mx.float32) / head)
    got = BY_KERNELS.qkv_rope(x, weight, offset, periods, heads, groups, head)
    expected = BY_MLX.qkv_rope(*wide(x, weight), offset, periods, heads, groups, head)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        close(one, other)


@on_cuda
def test_a_row_gets_the_same_numbers_in_any_company() -> None:
    mx.random.seed(1)
    weight, x = random(2048, 576, dtype=mx.bfloat16), random(64, 1, 576, dtype=mx.bfloat16)
    others = mx.concatenate([x[7:8], random(31, 1, 576, dtype=mx.bfloat16)])
    wanted = BY_KERNELS.matmul(x, weight)[7]
    assert mx.array_equal(BY_KERNELS.matmul(others, weight)[0], wanted).item()
    assert mx.array_equal(BY_KERNELS.matmul(x[:32], weight)[7], wanted).item()


@on_cuda
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_few_rows_and_all_others(bias: bool) -> None:
    mx.random.seed(2)
    layer = nn.Linear(576, 64, bias=bias)
    layer.set_dtype(mx.bfloat16)
    ours = nn.Linear(576, 64, bias=bias)
    ours.update(layer.parameters())
    ours.__class__ = SmallMatmulLinear
    for shape in ((32, 1), (64, 1), (1, 32), (7, 1), (3, 50)):
        x = random(*shape, 576, dtype=mx.bfloat16)
        close(ours(x), layer(x))
    close(ours(mx.ones((32, 1, 576))), layer(mx.ones((32, 1, 576))))


def test_weights_that_the_kernels_cannot_take() -> None:
    assert small_matmul.fits(mx.zeros((64, 96), dtype=mx.bfloat16))
    for rows, size, dtype in (
        (64, 96, mx.float32),
        (48, 96, mx.bfloat16),
        (64, 80, mx.float16),
        (MAX_WEIGHT_ROWS + 32, 32, mx.bfloat16),
    ):
        assert not small_matmul.fits(mx.zeros((rows, size), dtype=dtype))
    assert small_matmul.fits_heads(96) and not small_matmul.fits_heads(80)


@pytest.mark.parametrize("rows", WIDTHS)
def test_no_block_asks_for_more_shared_memory_than_any_gpu_has(rows: int) -> None:
    for size in (32, 576, 2048, 14336):
        for kind in small_matmul.KINDS:
            warps = kind.warps_for(size)
            assert size % (32 * warps) == 0
            assert kind.shared_bytes(rows, warps) <= 99 * 1024
