"""The few-row matmuls with packed weights: their own source, on the CPU, against MLX's operations."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.kernels import matmul_tilings, matmul_tuning, packed_tilings, small_matmul
from millstream.backend.kernels.matmul_tilings import SHAPES, BlockShape
from millstream.backend.kernels.weights import Norm, Packed
from millstream.backend.layers import matmul_reference
from support.cuda_on_host import missing_compiler
from support.matmul_on_host import run_on_host

WHY_NOT = missing_compiler() or (
    None if current_device().kind == "cpu" else "no emulator inside compiled functions: needs MLX's CPU device"
)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ROWS = 64


@pytest.fixture(autouse=True)
def _on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_matmul, "run", run_on_host)
    monkeypatch.setattr(matmul_tuning, "_shapes", {})
    for module in (matmul_tilings, packed_tilings):
        monkeypatch.setattr(module, "multiprocessors", lambda: 3)


def packed(outputs: int, inputs: int, bits: int = 4, group_size: int = 64) -> Packed:
    plain = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
    weight = small_matmul.prepare(Packed(*mx.quantize(plain, group_size, bits), bits, group_size))
    assert isinstance(weight, Packed)
    return weight


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def norm_of(size: int) -> Norm:
    return Norm((1 + 0.3 * mx.random.normal((size,))).astype(mx.bfloat16), 1e-5)


def check(run: Callable[[object, int], mx.array], widths: tuple[int, ...] = (1, 20)) -> None:
    """As MLX within rounding, and bitwise the same numbers for a row in a step and in passes that stand for it."""
    expected = run(matmul_reference, ROWS).astype(mx.float32)
    with matmul_tuning.as_step_of(8):
        wide = run(small_matmul, ROWS)
        narrow = [run(small_matmul, rows) for rows in widths]
    most = mx.abs(expected).max().item()
    assert mx.abs(wide.astype(mx.float32) - expected).max().item() <= 0.02 * most
    assert all(mx.array_equal(each, wide[: len(each)]).item() for each in narrow)


@pytest.mark.parametrize("split", [1, 4, 8])
def test_a_product_with_a_norm(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks share a tile. The last unit of K is not whole, and some slices are empty."""
    mx.random.seed(split)
    monkeypatch.setattr(packed_tilings, "_split", lambda blocks: split)
    weight, x, norm = packed(36, 32 * 13, group_size=32), random(ROWS, 1, 32 * 13), norm_of(32 * 13)
    check(lambda functions, rows: functions.matmul(x[:rows], weight, norm=norm))  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_blocks_of_all_shapes_give_one_row_the_same(shape: BlockShape) -> None:
    mx.random.seed(2)
    weight, x, residual = packed(160, 1280), random(ROWS, 1, 1280), random(ROWS, 1, 160)
    matmul_tuning.decide_shape(matmul_tuning.size_of(weight), shape)
    check(
        lambda functions, rows: functions.matmul_add(x[:rows], weight, residual[:rows]),  # type: ignore[attr-defined]
        (5,),
    )


@pytest.mark.parametrize("bits", [3, 8])
def test_other_packings(bits: int) -> None:
    mx.random.seed(bits)
    weight, x, norm = packed(64, 640, bits), random(ROWS, 1, 640), norm_of(640)
    check(lambda functions, rows: functions.glu(x[:rows], weight, norm=norm), (3,))  # type: ignore[attr-defined]


@pytest.mark.parametrize("normed", [False, True])
def test_heads(normed: bool) -> None:
    mx.random.seed(7)
    size = 64
    weight, x, norm = packed(4 * size, 256), random(ROWS, 1, 256), norm_of(256)
    offsets = mx.random.randint(0, 500, (ROWS,)).astype(mx.int32)
    periods = 10_000.0 ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    head_norm = norm_of(size) if normed else None

    def run(functions: object, rows: int) -> mx.array:
        made = functions.qkv_rope(  # type: ignore[attr-defined]
            *(x[:rows], weight, offsets[:rows], periods, 2, 1, size), norm=norm, q_norm=head_norm, k_norm=head_norm
        )
        return mx.concatenate([each.reshape(rows, -1) for each in made], axis=1)

    check(run, (2, 20))
