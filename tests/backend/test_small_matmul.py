"""The CUDA kernels for small-batch matmuls against their MLX reference. Skipped where there is no CUDA."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.layers.fused_blocks import SmallMatmulEmbedding, SmallMatmulLinear
from millstream.backend.kernels import matmul_tilings, matmul_tuning, packed_tilings, small_matmul
from millstream.backend.kernels.matmul_tilings import BlockShape
from millstream.backend.kernels.weights import Norm, Packed, as_weight
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX, Activation

on_cuda = pytest.mark.skipif(
    current_device().kind != "cuda", reason="compiles CUDA kernels: needs MLX's CUDA build and an NVIDIA GPU"
)
# Compiling a case takes seconds.

MEMORIES = (99 * 1024, 163 * 1024, 227 * 1024)
"""Bytes of shared memory that a block may have: on an RTX 4090, an A100, an H200."""


def random(*shape: int, dtype: mx.Dtype, scale: float = 0.3) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


def close(got: mx.array, expected: mx.array) -> None:
    """Within what rounding to the type of the rows can do, twice."""
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    assert got.shape == expected.shape
    assert not mx.isnan(got).any().item()
    assert mx.abs(got - expected).max().item() <= 0.02 * max(1.0, mx.abs(expected).max().item())


def wide(*arrays: mx.array) -> list[mx.array]:
    return [array.astype(mx.float32) for array in arrays]


def norm_of(size: int, dtype: mx.Dtype) -> tuple[Norm, Norm]:
    """A norm, and the same in float32."""
    weight = 1 + random(size, dtype=dtype)
    return Norm(weight, 1e-5), Norm(weight.astype(mx.float32), 1e-5)


@on_cuda
@pytest.mark.parametrize(
    ("count", "size", "rows", "dtype", "shared"),
    [
        (64, 192, 1, mx.bfloat16, True),
        (4098, 576, 12, mx.float16, False),
        (4096, 576, 64, mx.bfloat16, True),
        (2048, 8192, 32, mx.bfloat16, True),
        (2048, 2880, 150, mx.bfloat16, True),
    ],
)
def test_matmuls(count: int, size: int, rows: int, dtype: mx.Dtype, shared: bool) -> None:
    mx.random.seed(rows)
    plain = random(count, size, dtype=dtype, scale=size**-0.5)
    weight = BY_KERNELS.prepare(plain) if shared else plain
    x, residual = random(rows, 1, size, dtype=dtype), random(rows, 1, count, dtype=dtype)
    bias, (norm, wide_norm) = random(count, dtype=dtype), norm_of(size, dtype)
    wide_bias = bias.astype(mx.float32)
    close(BY_KERNELS.matmul(x, weight), BY_MLX.matmul(*wide(x, plain)))
    close(
        BY_KERNELS.matmul(x, weight, bias=bias, norm=norm),
        BY_MLX.matmul(*wide(x, plain), bias=wide_bias, norm=wide_norm),
    )
    for _ in range(2):
        close(
            BY_KERNELS.matmul_add(x, weight, residual, bias=bias, factor=0.5),
            BY_MLX.matmul_add(*wide(x, plain, residual), bias=wide_bias, factor=0.5),
        )
    close(BY_KERNELS.glu(x, weight, norm=norm), BY_MLX.glu(*wide(x, plain), norm=wide_norm))


@on_cuda
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clipped"])
def test_gated_units(activation: Activation) -> None:
    mx.random.seed(3)
    weight, x = random(200, 192, dtype=mx.bfloat16, scale=1.0), random(5, 1, 192, dtype=mx.bfloat16, scale=1.0)
    got = BY_KERNELS.glu(x, weight, activation=activation)
    close(got, BY_MLX.glu(*wide(x, weight), activation=activation))


@on_cuda
@pytest.mark.parametrize(
    ("heads", "groups", "head", "turned", "rows", "dtype", "normed"),
    [
        (9, 3, 64, 64, 32, mx.bfloat16, False),
        (4, 4, 128, 64, 64, mx.bfloat16, True),
        (3, 1, 96, 0, 5, mx.float16, True),
        (4, 1, 256, 256, 40, mx.bfloat16, True),
    ],
)
def test_projections_with_rope(
    heads: int, groups: int, head: int, turned: int, rows: int, dtype: mx.Dtype, normed: bool
) -> None:
    mx.random.seed(rows)
    x = random(rows, 1, 576, dtype=dtype)
    plain = random((heads + 2 * groups) * head, 576, dtype=dtype, scale=0.05)
    bias = random((heads + 2 * groups) * head, dtype=dtype)
    offset = mx.random.randint(0, 3000, (rows,)).astype(mx.int32)
    periods = 10000.0 ** (mx.arange(0, turned, 2, dtype=mx.float32) / turned) if turned else None
    (norm, wide_norm), (head_norm, wide_head_norm) = norm_of(576, dtype), norm_of(head, dtype)
    shape = (offset, periods, heads, groups, head)
    ours: dict[str, Any] = {"q_norm": head_norm, "k_norm": head_norm} if normed else {}
    theirs: dict[str, Any] = {"q_norm": wide_head_norm, "k_norm": wide_head_norm} if normed else {}
    got = BY_KERNELS.qkv_rope(x, BY_KERNELS.prepare(plain), *shape, bias=bias, norm=norm, factor=1.25, **ours)
    expected = BY_MLX.qkv_rope(
        *wide(x, plain), *shape, bias=bias.astype(mx.float32), norm=wide_norm, factor=1.25, **theirs
    )
    for one, other in zip(got, expected, strict=True):
        close(one, other)


@on_cuda
@pytest.mark.parametrize("size", [64, 1152, 4096])
def test_a_norm_and_a_residual(size: int) -> None:
    x, residual = random(5, 1, size, dtype=mx.bfloat16), random(5, 1, size, dtype=mx.bfloat16)
    (norm, wide_norm), (after, wide_after) = norm_of(size, mx.bfloat16), norm_of(size, mx.bfloat16)
    wide_x, wide_residual = wide(x, residual)
    got = BY_KERNELS.norm_add(x, norm, residual, after=after)
    for one, other in zip(got, BY_MLX.norm_add(wide_x, wide_norm, wide_residual, after=wide_after), strict=True):
        close(one, other)
    assert mx.array_equal(BY_KERNELS.norm_add(x, norm, residual), got[0]).item()


@on_cuda
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_gets_the_same_numbers_in_any_company(shared: bool) -> None:
    """In steps of up to 64 rows, and in passes of more tokens that stand for one. Steps of more rows take what was
    found to be fastest for them, here MLX's operations: these give other numbers."""
    mx.random.seed(1)
    plain, x = random(2048, 576, dtype=mx.bfloat16), random(70, 1, 576, dtype=mx.bfloat16)
    weight = BY_KERNELS.prepare(plain) if shared else plain
    norm, _ = norm_of(576, mx.bfloat16)
    others = mx.concatenate([x[7:8], random(31, 1, 576, dtype=mx.bfloat16)])
    wanted = BY_KERNELS.matmul(x[7:8], weight, norm=norm)[0]
    assert mx.array_equal(BY_KERNELS.matmul(others, weight, norm=norm)[0], wanted).item()
    for rows in (8, 9, 32, 64):
        assert mx.array_equal(BY_KERNELS.matmul(x[:rows], weight, norm=norm)[7], wanted).item()
    for step in matmul_tilings.WIDTHS:
        with matmul_tuning.as_step_of(step):
            assert mx.array_equal(BY_KERNELS.matmul(x, weight, norm=norm)[7], wanted).item()
    close(BY_KERNELS.matmul(x, weight, norm=norm)[7], wanted)


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


@on_cuda
def test_an_embedding_takes_few_rows_and_all_others() -> None:
    layer = nn.Embedding(100, 576)
    layer.set_dtype(mx.bfloat16)
    ours = nn.Embedding(100, 576)
    ours.update(layer.parameters())
    ours.__class__ = SmallMatmulEmbedding
    for shape in ((8, 1), (64, 1), (3, 50)):
        x = random(*shape, 576, dtype=mx.bfloat16)
        close(ours.as_linear(x), layer.as_linear(x))
    assert mx.array_equal(ours(mx.array([3, 4])), layer(mx.array([3, 4]))).item()


def test_weights_that_the_kernels_cannot_take() -> None:
    assert small_matmul.fits(mx.zeros((64, 192), dtype=mx.bfloat16))
    assert small_matmul.fits(mx.zeros((50, 64), dtype=mx.float16))
    for rows, size, dtype in ((64, 64, mx.float32), (49, 64, mx.bfloat16), (64, 96, mx.float16)):
        assert not small_matmul.fits(mx.zeros((rows, size), dtype=dtype))
    packed, scales, biases = mx.quantize(mx.zeros((64, 96)), 32, 4)
    assert not small_matmul.fits(Packed(packed, scales, biases, 4, 32))
    assert [size for size in (64, 72, 80, 96, 128, 192, 256, 320) if small_matmul.fits_heads(size)] == [
        64,
        96,
        128,
        192,
        256,
    ]


@pytest.mark.parametrize("head", [0, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", matmul_tilings.SHAPES)
@pytest.mark.parametrize("memory", MEMORIES)
def test_blocks_of_all_widths_split_a_sum_alike(
    head: int, shared: bool, shape: BlockShape, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none asks for more threads or shared memory than a block of its GPU may have; blocks that do not walk are the
    same on every GPU."""
    monkeypatch.setattr(matmul_tilings, "shared_limit", lambda: memory)
    widths = {matmul_tilings.width_of(rows, head) for rows in (1, 9, 20, 64, 200)}
    tilings = {width: matmul_tilings.choose(width, head=head, shared=shared, shape=shape) for width in widths}
    for width, tiling in tilings.items():
        assert tiling.shared_bytes(width) <= (memory if tiling.walks else matmul_tilings.MAX_SHARED)
        assert tiling.threads <= 256 and tiling.depth >= 2
        assert tiling.along % tiling.group == 0
        assert tiling.lines == (head or 16 * (shape.tiles if width == 8 else 2))
        assert shared or tiling.split == 1
    assert len({(tiling.along * tiling.split, tiling.group) for tiling in tilings.values()}) == 1


def test_rows_have_a_width() -> None:
    assert [matmul_tilings.width_of(rows) for rows in (1, 8, 9, 17, 64, 65, 256)] == [8, 8, 32, 32, 64, 64, 64]
    assert matmul_tilings.width_of(64, 256) == 32


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("shape", matmul_tilings.SHAPES)
def test_walking_blocks_have_something_on_its_way(
    memory: int, shape: BlockShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever shared memory a GPU has, or they do not walk; and two of them share it if it is large."""
    monkeypatch.setattr(matmul_tilings, "shared_limit", lambda: memory)
    tiling = matmul_tilings.for_few_rows(shape)
    shared = tiling.shared_bytes(8)
    assert tiling.tiles == shape.tiles and shared <= memory
    assert not tiling.walks or tiling.depth >= matmul_tilings.MIN_DEPTH
    assert not tiling.walks or matmul_tilings.resident(shared) == (2 if memory > 99 * 1024 else 1)
    assert memory < 227 * 1024 or tiling.walks == shape.walks


@pytest.mark.parametrize("shape", matmul_tilings.SHAPES)
def test_blocks_of_a_packed_weight_walk_or_are_as_many_as_tiles(
    shape: BlockShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_tilings, "multiprocessors", lambda: 7)
    weight = Packed(*mx.quantize(mx.zeros((64, 128)), 64, 4), 4, 64)
    tiling = packed_tilings.choose(weight, 8, head=0, shape=shape)
    assert tiling.tiles == shape.tiles and tiling.blocks(5, 8) == 5
    assert tiling.blocks(100, 8) == (14 if shape.walks else 100)


@on_cuda
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("count", "size"), [(96, 192), (20_000, 512)])
def test_blocks_of_all_shapes_give_the_same_numbers(
    packed: bool, count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one row alone and to one of eight: bitwise."""
    monkeypatch.setattr(matmul_tuning, "_shapes", {})
    mx.random.seed(count)
    plain = random(count, size, dtype=mx.bfloat16, scale=size**-0.5)
    weight = as_weight(Packed(*mx.quantize(plain, 64, 4), 4, 64) if packed else plain)
    x, residual = random(8, 1, size, dtype=mx.bfloat16), random(8, 1, count, dtype=mx.bfloat16)
    norm, _ = norm_of(size, mx.bfloat16)
    found = []
    for shape in matmul_tilings.SHAPES:
        matmul_tuning.decide_shape(matmul_tuning.size_of(weight), shape)
        for rows in (1, 8):
            added = small_matmul.matmul_add(x[:rows], weight, residual[:rows], norm=norm)
            found.append((added[0], small_matmul.glu(x[:rows], weight, norm=norm)[0]))
    for others in found[1:]:
        assert all(mx.array_equal(*pair).item() for pair in zip(found[0], others, strict=True))
