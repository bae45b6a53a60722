"""The few-row matmuls in warp groups: their own source, on the CPU, against MLX's operations; and their blocks."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tilings, small_matmul
from millstream.backend.kernels.matmul_tilings import WIDTHS
from millstream.backend.kernels.weights import Norm
from millstream.backend.layers import matmul_reference
from support.cuda_on_host import missing_compiler
from support.matmul_on_host import run_on_host
from support.tiers import some

ROWS = WIDTHS[-1]
MANY = (100, 130)
K = 320

on_host = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends a GPU of sm_90 with so many multiprocessors."""

    def pretend(multiprocessors: int) -> None:
        monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: True)
        monkeypatch.setattr(matmul_tilings, "shared_limit", lambda: 227 * 1024)
        monkeypatch.setattr(matmul_tilings, "multiprocessors", lambda: multiprocessors)

    monkeypatch.setattr(small_matmul, "run", run_on_host)
    return pretend


def random(*shape: int, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(mx.bfloat16)


def wide(norm: Norm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight.astype(mx.float32), norm.eps)


def check(compute: Callable[..., object], arrays: list[mx.array], *rest: object, **named: object) -> None:
    """The same as MLX within rounding, and bitwise the same numbers for a row at every width."""

    def run(functions: object, rows: int, kind: mx.Dtype, arrays: list[mx.array] = arrays) -> list[mx.array]:
        x, weight, *others = (array.astype(kind) if array.dtype == mx.bfloat16 else array for array in arrays)
        weight = small_matmul.prepare(weight) if kind == mx.bfloat16 else weight
        given = {name: wide(norm) if kind == mx.float32 else norm for name, norm in named.items()}  # type: ignore[arg-type]
        function = getattr(functions, compute.__name__)
        made = function(x[:rows], weight, *(other[:rows] for other in others), *rest, **given)
        return list(made) if isinstance(made, tuple) else [made]

    expected, full = run(matmul_reference, ROWS, mx.float32), run(small_matmul, ROWS, mx.bfloat16)
    for one, other in zip(full, expected, strict=True):
        most = mx.abs(other).max().item()
        assert mx.abs(one.astype(mx.float32) - other).max().item() <= 0.012 * max(1.0, most)
    for rows in MANY:  # in one go, not in bands
        given = [array if array is arrays[1] else mx.concatenate([array] * 3)[:rows] for array in arrays]
        expected = run(matmul_reference, rows, mx.float32, given)
        for one, other in zip(run(small_matmul, rows, mx.bfloat16, given), expected, strict=True):
            assert mx.abs(one.astype(mx.float32) - other).max().item() <= 0.012 * max(1.0, mx.abs(other).max().item())
    for rows in (1, 5, 30):
        narrow = run(small_matmul, rows, mx.bfloat16)
        assert all(mx.array_equal(one, other[:rows]).item() for one, other in zip(narrow, full, strict=True)), rows


@on_host
@pytest.mark.parametrize(
    ("normed", "multiprocessors"),
    some([(False, 1), (False, 4), (True, 1), (True, 4)], [(False, 1), (True, 4)]),
)
def test_a_product(multiprocessors: int, normed: bool, large_gpu: Callable[[int], None]) -> None:
    """Whether a tile has one block or several; the last tile has fewer lines."""
    large_gpu(multiprocessors)
    mx.random.seed(multiprocessors)
    weight = random(132, K, scale=K**-0.5)
    assert (matmul_tilings.parts_of(132) > 1) == (multiprocessors > 1)
    norm = Norm(1 + random(K, scale=0.3), 1e-5) if normed else None
    check(small_matmul.matmul, [random(ROWS, 1, K), weight], norm=norm)


@on_host
def test_a_residual(large_gpu: Callable[[int], None]) -> None:
    large_gpu(4)
    mx.random.seed(3)
    check(small_matmul.matmul_add, [random(ROWS, 1, 64), random(64, 64, scale=0.1), random(ROWS, 1, 64)])


@on_host
def test_a_gated_unit(large_gpu: Callable[[int], None]) -> None:
    large_gpu(2)
    mx.random.seed(4)
    arrays = [random(ROWS, 1, K), random(256, K, scale=K**-0.5)]
    check(small_matmul.glu, arrays, norm=Norm(1 + random(K, scale=0.3), 1e-5))


@on_host
@pytest.mark.parametrize(("size", "normed"), some([(64, False), (128, False), (128, True)], [(64, False), (128, True)]))
def test_heads(size: int, normed: bool, large_gpu: Callable[[int], None]) -> None:
    large_gpu(2)
    mx.random.seed(size)
    arrays = [random(ROWS, 1, 128), random(4 * size, 128, scale=0.1)]
    offsets = mx.random.randint(0, 500, (ROWS,)).astype(mx.int32)
    periods = 10_000.0 ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    norm = Norm(1 + random(size, scale=0.3), 1e-6) if normed else None
    check(
        small_matmul.qkv_rope,
        [*arrays, offsets],
        *(periods, 2, 1, size),
        norm=Norm(1 + random(128, scale=0.3), 1e-5),
        q_norm=norm,
        k_norm=norm,
    )


@pytest.mark.parametrize("outputs", [512, 2048, 3072, 6144, 28672, 262144])
@pytest.mark.parametrize("head", [0, 64, 128, 256])
@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_blocks_of_all_widths_split_a_sum_alike(
    outputs: int, head: int, multiprocessors: int, large_gpu: Callable[[int], None]
) -> None:
    """And none asks for more threads or shared memory than there are."""
    large_gpu(multiprocessors)
    tilings = {width: matmul_tilings.in_warpgroups(width, outputs, head) for width in WIDTHS}
    assert len({tiling.split for tiling in tilings.values()}) == 1
    for width, tiling in tilings.items():
        assert tiling.lines % 64 == 0 and tiling.threads <= 512 and tiling.depth >= matmul_tilings.MIN_DEPTH
        assert tiling.lines == head if head else True
        assert tiling.shared_bytes(width) <= 227 * 1024
        parts_of_a_head = matmul_tilings.in_warpgroups(width, outputs, 0, 64)
        assert parts_of_a_head.lines == 64 and parts_of_a_head.split == tiling.split


def test_which_weights_multiply_in_warp_groups(
    large_gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = mx.zeros((64, 64), dtype=mx.bfloat16)
    assert not small_matmul.in_warpgroups(small_matmul.prepare(weight)), "no such GPU"
    large_gpu(4)
    assert small_matmul.in_warpgroups(small_matmul.prepare(weight))
    assert not small_matmul.in_warpgroups(small_matmul.as_weight(weight)), "blocks that share a tile need counters"
    assert small_matmul.in_warpgroups(small_matmul.prepare(weight), 128)
    assert not small_matmul.in_warpgroups(small_matmul.prepare(weight), 96)
