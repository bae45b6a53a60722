"""Heads and gated units after a matmul of many rows: which are taken, and on CUDA their numbers."""

from __future__ import annotations

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.kernels import epilogues
from millstream.backend.kernels.weights import Norm
from millstream.backend.layers import matmul_reference
from millstream.backend.layers.fused_matmul import BY_CUBLAS
from support.matmul_kernels import play_matmul_kernels

on_cuda = pytest.mark.skipif(
    current_device().kind != "cuda", reason="compiles CUDA kernels: needs MLX's CUDA build and an NVIDIA GPU"
)


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def close(got: mx.array, expected: mx.array) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    difference = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max().item()
    assert difference <= 0.02 * max(1.0, mx.abs(expected).max().item())


def periods_of(count: int) -> mx.array:
    return 10_000.0 ** (mx.arange(count, dtype=mx.float32) / count)


@on_cuda
@pytest.mark.parametrize(
    ("rows", "length", "size", "turned", "normed", "factor"),
    [(100, 1, 64, 64, False, 1.0), (2, 37, 128, 128, True, 1.0), (1, 5, 256, 64, True, 1.2), (3, 2, 96, 0, False, 1.0)],
)
def test_heads(rows: int, length: int, size: int, turned: int, normed: bool, factor: float) -> None:
    joined, offset = random(rows, length, 6 * size), mx.random.randint(0, 3000, (rows,)).astype(mx.int32)
    norms = [Norm(1 + random(size), 1e-6) if normed else None for _ in range(2)]
    periods = periods_of(turned // 2) if turned else None
    assert epilogues.fits_heads(size, periods, joined.dtype)
    made, expected = (
        by.heads_of(joined, offset, periods, 4, 1, size, q_norm=norms[0], k_norm=norms[1], factor=factor)
        for by in (epilogues, matmul_reference)
    )
    for one, other in zip(made, expected, strict=True):
        close(one, other)


@on_cuda
@pytest.mark.parametrize("activation", matmul_reference.ACTIVATIONS)
def test_gated_units(activation: matmul_reference.Activation) -> None:
    joined = random(3, 70, 2 * 1000)
    close(epilogues.gated(joined, activation), matmul_reference.gated(joined, activation))


def test_heads_that_one_thread_cannot_turn_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    offset = mx.array([3, 4], dtype=mx.int32)
    for size, taken in ((64, True), (80, False)):
        launched.clear()
        x, weight, periods = random(2, 3, 32), random(4 * size, 32), periods_of(size // 2)
        made = BY_CUBLAS.qkv_rope(x, weight, offset, periods, 2, 1, size)
        assert launched == ["heads"] * taken
        expected = matmul_reference.qkv_rope(x, weight, offset, periods, 2, 1, size)
        assert all(mx.array_equal(one, other).item() for one, other in zip(made, expected, strict=True))


def test_numbers_of_other_kinds_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    x, weight = random(2, 3, 32), random(32, 32)
    for dtype, taken in ((mx.bfloat16, True), (mx.float32, False)):
        launched.clear()
        arrays = x.astype(dtype), weight.astype(dtype)
        assert mx.array_equal(BY_CUBLAS.glu(*arrays), matmul_reference.glu(*arrays)).item()
        assert launched == ["gated"] * taken
