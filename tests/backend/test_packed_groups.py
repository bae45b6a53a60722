"""The few-row matmuls with packed weights in groups of warps: their own source, on the CPU, against MLX's operations."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tilings, matmul_tuning, packed_groups, small_matmul
from millstream.backend.kernels.matmul_tilings import WIDTHS
from millstream.backend.kernels.weights import Dense, Norm, Packed
from millstream.backend.layers import matmul_reference
from support.cuda_on_host import missing_compiler
from support.matmul_on_host import run_on_host

ROWS = WIDTHS[-1]

on_host = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


@pytest.fixture(autouse=True)
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A GPU of sm_90 with as many multiprocessors as it is told."""

    def pretend(multiprocessors: int) -> None:
        monkeypatch.setattr(matmul_tilings, "multiprocessors", lambda: multiprocessors)

    monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: True)
    monkeypatch.setattr(matmul_tilings, "shared_limit", lambda: 227 * 1024)
    monkeypatch.setattr(matmul_tuning, "_groups", {})
    monkeypatch.setattr(small_matmul, "run", run_on_host)
    pretend(4)
    return pretend


def packed(outputs: int, inputs: int, bits: int = 4, group_size: int = 64, mode: str = "affine") -> Packed:
    """A weight whose steps of more than a few rows are decided to multiply in groups."""
    plain = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
    made, scales, *biases = mx.quantize(plain, group_size, bits, mode)
    weight = small_matmul.prepare(Packed(made, scales, biases[0] if biases else None, bits, group_size, mode))
    assert isinstance(weight, Packed)
    for width in WIDTHS[1:]:
        matmul_tuning.decide_groups(matmul_tuning.size_of(weight), width, True)
    return weight


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def norm_of(size: int) -> Norm:
    return Norm((1 + 0.3 * mx.random.normal((size,))).astype(mx.bfloat16), 1e-5)


def check(weight: Packed, run: Callable[..., mx.array]) -> None:
    """As MLX's numbers within rounding, and bitwise the same for a row in a step and in passes that stand for it."""
    dense = mx.dequantize(
        weight.packed, weight.scales, weight.biases, weight.group_size, weight.bits, weight.mode, dtype=mx.bfloat16
    )
    expected = run(matmul_reference, Dense(dense), ROWS).astype(mx.float32)
    full = run(small_matmul, weight, ROWS)
    assert mx.abs(full.astype(mx.float32) - expected).max().item() <= 0.02 * mx.abs(expected).max().item()
    assert mx.array_equal(run(small_matmul, weight, 20), full[:20]).item()
    with matmul_tuning.as_step_of(20):
        assert mx.array_equal(run(small_matmul, weight, 3), full[:3]).item()


@on_host
@pytest.mark.parametrize("multiprocessors", [1, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_a_product(multiprocessors: int, normed: bool, large_gpu: Callable[[int], None]) -> None:
    """Whether a tile has one block or several. The last tile has fewer lines, the last unit of K is not whole."""
    large_gpu(multiprocessors)
    mx.random.seed(multiprocessors)
    size = 32 * 29
    weight, x, norm = packed(132, size, group_size=32), random(ROWS, 1, size), norm_of(size) if normed else None
    assert (matmul_tilings.parts_of(132) > 1) == (multiprocessors > 1)
    check(weight, lambda functions, given, rows: functions.matmul(x[:rows], given, norm=norm))
