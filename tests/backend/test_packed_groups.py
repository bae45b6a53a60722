"""Packed weights in groups of warps: the kernels' own source, on the CPU, against MLX's operations; and the choice."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tilings, matmul_tuning, packed_groups, small_matmul
from millstream.backend.kernels.matmul_tilings import WIDTHS
from millstream.backend.kernels.matmul_tuning import Key
from millstream.backend.kernels.weights import Dense, Norm, Packed, Weight
from millstream.backend.layers import matmul_reference, packed_choice
from support.cuda_on_host import missing_compiler
from support.matmul_on_host import run_on_host
from support.tiers import some

ROWS = WIDTHS[-1]

on_host = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


@pytest.fixture(autouse=True)
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A GPU of sm_90 with as many multiprocessors as it is told."""

    def pretend(multiprocessors: int) -> None:
        for module in (matmul_tilings, packed_groups):
            monkeypatch.setattr(module, "multiprocessors", lambda: multiprocessors)

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
@pytest.mark.parametrize(
    ("normed", "multiprocessors"),
    some([(False, 1), (False, 4), (True, 1), (True, 4)], [(False, 1), (True, 4)]),
)
def test_a_product(multiprocessors: int, normed: bool, large_gpu: Callable[[int], None]) -> None:
    """Whether a tile has one block or several. The last tile has fewer lines, the last unit of K is not whole."""
    large_gpu(multiprocessors)
    mx.random.seed(multiprocessors)
    size = 32 * 29
    weight, x, norm = packed(132, size, group_size=32), random(ROWS, 1, size), norm_of(size) if normed else None
    assert (matmul_tilings.parts_of(132) > 1) == (multiprocessors > 1)
    check(weight, lambda functions, given, rows: functions.matmul(x[:rows], given, norm=norm))


@on_host
@pytest.mark.parametrize(
    ("bits", "group_size", "mode"),
    some(
        [
            (4, 128, "affine"),
            (8, 64, "affine"),
            (3, 64, "affine"),
            (6, 32, "affine"),
            (4, 32, "mxfp4"),
            (4, 16, "nvfp4"),
        ],
        [(8, 64, "affine"), (3, 64, "affine"), (4, 16, "nvfp4")],
    ),
)
def test_packings(bits: int, group_size: int, mode: str) -> None:
    mx.random.seed(bits)
    weight, x, residual = packed(72, 640, bits, group_size, mode), random(ROWS, 1, 640), random(ROWS, 1, 72)
    check(weight, lambda functions, given, rows: functions.matmul_add(x[:rows], given, residual[:rows]))


@on_host
def test_a_gated_unit(large_gpu: Callable[[int], None]) -> None:
    large_gpu(1)
    mx.random.seed(5)
    weight, x, norm = packed(336, 384), random(ROWS, 1, 384), norm_of(384)
    check(weight, lambda functions, given, rows: functions.glu(x[:rows], given, norm=norm))


@on_host
@pytest.mark.parametrize(("size", "normed"), some([(64, False), (128, False), (128, True)], [(64, False), (128, True)]))
def test_heads(size: int, normed: bool) -> None:
    mx.random.seed(size)
    weight, x, norm = packed(4 * size, 256), random(ROWS, 1, 256), norm_of(256)
    offsets = mx.random.randint(0, 500, (ROWS,)).astype(mx.int32)
    periods = 10_000.0 ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    head_norm = norm_of(size) if normed else None

    def run(functions: Any, given: Weight, rows: int) -> mx.array:
        made = functions.qkv_rope(
            *(x[:rows], given, offsets[:rows], periods, 2, 1, size), norm=norm, q_norm=head_norm, k_norm=head_norm
        )
        return mx.concatenate([each.reshape(rows, -1) for each in made], axis=1)

    check(weight, run)


@on_host
def test_bands_of_many_rows() -> None:
    """A pass that stands for a step may have more rows than a block takes."""
    mx.random.seed(6)
    weight, x = packed(64, 256), random(2 * ROWS + 5, 1, 256)
    full = small_matmul.matmul(x[:ROWS], weight)
    with matmul_tuning.as_step_of(ROWS):
        assert mx.array_equal(small_matmul.matmul(x, weight)[:ROWS], full).item()


def bodies(weight: Packed, steps: Sequence[tuple[int | None, int]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What multiplies: for the rows of the step that a pass stands for (None: a step itself), and its own."""
    taken: list[str] = []
    monkeypatch.setattr(small_matmul, "run", lambda kind, tiling, *rest: taken.append(tiling.body) or [mx.zeros(1)])
    for step, rows in steps:
        with contextlib.nullcontext() if step is None else matmul_tuning.as_step_of(step):
            small_matmul.matmul(random(rows, 1, weight.inputs), weight)
    return taken


def test_a_pass_takes_what_its_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(64, 256)
    matmul_tuning.decide_groups(matmul_tuning.size_of(weight), 32, False)
    steps = [(None, 8), (None, 9), (None, 33), (None, 64), (8, 64), (32, 64), (33, 20), (64, 256)]
    assert bodies(weight, steps, monkeypatch) == [
        *("walking", "bands", "groups", "groups", "many rows", "bands", "groups", "groups")
    ]


def test_which_weights_groups_take(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(64, 256)
    bare = dataclasses.replace(weight, tickets=None)
    assert packed_groups.in_groups(weight, 32).split > 1
    assert packed_groups.in_groups(bare, 32).split == 1, "blocks that share a tile need counters"
    assert packed_groups.takes(128) and packed_groups.takes(0, 64)
    assert not any(packed_groups.takes(*sizes) for sizes in ((96,), (256,), (0, 96)))
    assert bodies(weight, [(None, 257)], monkeypatch) == ["bands"], "there are no counters for so many"
    assert bodies(bare, [(None, 257)], monkeypatch) == ["groups"]
    monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: False)
    assert not packed_groups.takes() and bodies(weight, [(None, 64)], monkeypatch) == ["bands"]


@pytest.mark.parametrize("outputs", [512, 3072, 6144, 28672, 128256])
@pytest.mark.parametrize(("head", "within"), [(0, 0), (0, 64), (0, 128), (64, 0), (128, 0)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_fit_the_device_and_split_a_sum_alike(
    outputs: int, head: int, within: int, bits: int, large_gpu: Callable[[int], None]
) -> None:
    large_gpu(132)
    packed = mx.zeros((outputs, bits), dtype=mx.uint32)
    weight = Packed(packed, packed, packed, bits, 32, tickets=packed)
    tilings = {width: packed_groups.in_groups(weight, width, head=head, within=within) for width in WIDTHS[1:]}
    assert len({tiling.split for tiling in tilings.values()}) == 1
    for width, tiling in tilings.items():
        assert tiling.lines in (64, 128) and tiling.depth >= 3 and tiling.shared_bytes(width) <= 227 * 1024
        assert tiling.lines == head if head else within % tiling.lines == 0


@pytest.mark.parametrize(
    ("faster", "right", "used"), [((32, 64), True, (32, 64)), ((64,), True, (64,)), ((32, 64), False, ())]
)
def test_the_faster_body_is_taken_if_its_numbers_are_right(
    faster: tuple[int, ...], right: bool, used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = packed(1024, 2048)
    size = matmul_tuning.size_of(weight)
    matmul_tuning._groups.clear()
    measured: list[tuple[int, bool]] = []

    def measure(key: Key, weight: Packed, by_mlx: bool) -> float:
        assert not by_mlx
        measured.append((key[-1], matmul_tuning.in_groups(weight, key[-1])))
        return 2.0 if not measured[-1][1] else 1.0 if key[-1] in faster else 3.0

    def agrees(key: Key, weight: Packed) -> bool:
        assert matmul_tuning.in_groups(weight, key[-1]), "these numbers are asked for"
        return right

    packed_choice.tune_groups("glu", weight, measure, agrees)
    assert set(measured) == {(width, groups) for width in (32, 64) for groups in (False, True)}
    assert tuple(width for width in (32, 64) if matmul_tuning.in_groups(weight, width)) == used
    assert all(matmul_tuning.groups_known(size, width) for width in (32, 64))
    measured.clear()
    packed_choice.tune_groups("glu", weight, measure, agrees)
    assert not measured, "what is known is not measured again"


def test_groups_that_do_not_compile_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    weight = packed(1024, 2048)
    matmul_tuning._groups.clear()

    def measure(key: Key, weight: Packed, by_mlx: bool) -> float:
        if matmul_tuning.in_groups(weight, key[-1]):
            raise RuntimeError("told to")
        return 1.0

    packed_choice.tune_groups("matmul", weight, measure, lambda *_: True)
    assert not matmul_tuning.in_groups(weight, 32) and not matmul_tuning.in_groups(weight, 64)
    assert "told to" in caplog.text


def test_a_weight_with_counters_decides(large_gpu: Callable[[int], None]) -> None:
    large_gpu(132)
    bare = dataclasses.replace(packed(1024, 2048), tickets=None)
    matmul_tuning._groups.clear()
    packed_choice.tune_groups("matmul", bare, lambda *_: pytest.fail("measured"), lambda *_: True)


@on_host
def test_a_weight_without_counters() -> None:
    mx.random.seed(8)
    weight, x = dataclasses.replace(packed(136, 640), tickets=None), random(ROWS, 1, 640)
    check(weight, lambda functions, given, rows: functions.matmul(x[:rows], given))


def test_numbers_are_compared_with_the_unpacked_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(64, 256)
    for wrong in (1.0, 1.05):

        def matmul(x: mx.array, given: Packed, wrong: float = wrong) -> mx.array:
            return matmul_reference.matmul(x, given) * wrong

        monkeypatch.setattr(small_matmul, "matmul", matmul)
        assert packed_choice.agrees(("matmul", 64, 256, 32), weight) == (wrong == 1.0)
