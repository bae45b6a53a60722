"""What computes a large weight's products is chosen by measuring: our kernel, or MLX's operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tilings, matmul_tuning, small_matmul
from millstream.backend.kernels.matmul_tilings import MANY_WIDTHS, MOST_ROWS, SHAPES, USUAL, WIDTHS, BlockShape
from millstream.backend.kernels.matmul_tuning import Key
from millstream.backend.kernels.weights import Dense, Packed, Weight
from millstream.backend.layers import fused_matmul, matmul_choice
from millstream.backend.layers.fused_matmul import BY_KERNELS
from millstream.model_facts import GenerationFacts
from support.matmul_kernels import play_matmul_kernels

SIZE = 4096


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tuning, "_by_mlx", {})
    monkeypatch.setattr(matmul_tuning, "_shapes", {})
    monkeypatch.setattr(matmul_tuning, "_warpgroups", {})
    monkeypatch.setattr(matmul_tuning, "_steady_to", {})
    monkeypatch.setattr(matmul_tuning, "_expected", [])


def steady(key: Key, weight: Dense) -> int:
    return MOST_ROWS


def large() -> Dense:
    return Dense(mx.zeros((SIZE, SIZE), dtype=mx.bfloat16))


@pytest.mark.parametrize(("mlx", "used"), [(0.8, True), (0.95, False)])
def test_mlx_is_used_where_it_is_clearly_faster(mlx: float, used: bool) -> None:
    measured: list[Key] = []

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        measured.append(key)
        return mlx if by_mlx and key[-1] == 64 else 1.0

    matmul_choice.tune("matmul_add", large(), measure, steady)
    assert {key[-1] for key in measured} == set(WIDTHS)
    assert matmul_tuning.by_mlx("matmul_add", SIZE, SIZE, 40) == used
    assert not matmul_tuning.by_mlx("matmul_add", SIZE, SIZE, 32)
    assert not matmul_tuning.by_mlx("glu", SIZE, SIZE, 40)
    measured.clear()
    matmul_choice.tune("matmul_add", large(), measure, steady)
    assert not measured, "what is known is not measured again"


def test_small_weights_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "seconds", None)
    monkeypatch.setattr(matmul_choice, "shape_seconds", None)
    BY_KERNELS.prepare(mx.zeros((64, 64), dtype=mx.bfloat16), "glu")
    BY_KERNELS.prepare(mx.zeros((SIZE, SIZE), dtype=mx.bfloat16))
    assert not matmul_tuning._by_mlx and not matmul_tuning._shapes


@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu", "qkv_rope"])
def test_whole_forms_are_measured(role: fused_matmul.Role, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    monkeypatch.setattr(matmul_choice, "COPIES_BYTES", 3 * 64 * 64 * 2)
    key: Key = (role, 64, 64, 8)
    weight = Dense(mx.zeros((64, 64), dtype=mx.bfloat16))
    assert matmul_choice.seconds(key, weight, True) > 0 and not launched
    assert matmul_choice.seconds(key, weight, False) > 0
    assert launched == ["matmul_add" if role == "qkv_rope" else role] * matmul_choice.LAUNCHES
    assert not matmul_tuning.known(key), "measuring decides nothing"


def test_a_call_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight, x = mx.ones((64, 64), dtype=mx.bfloat16), mx.ones((20, 1, 64), dtype=mx.bfloat16)
    matmul_tuning.decide(("matmul", 64, 64, 32), True)
    assert mx.array_equal(BY_KERNELS.matmul(x, weight), x @ weight.T).item() and not launched
    assert mx.array_equal(BY_KERNELS.matmul(x[:8], weight), x[:8] @ weight.T).item() and launched == ["matmul"]


@pytest.mark.parametrize(
    ("width", "steady_to", "used", "limits"),
    [
        (8, 0, False, (256, 256, 256)),
        (8, 64, False, (256, 256, 256)),
        (8, 256, True, (256, 256, 256)),
        (32, 32, True, (256, 32, 256)),
        (32, 64, True, (256, 64, 256)),
        (64, 192, True, (256, 256, 192)),
    ],
)
def test_passes_are_as_wide_as_the_numbers_of_the_plain_step_stay_the_same(
    width: int, steady_to: int, used: bool, limits: tuple[int, ...]
) -> None:
    """Few rows must be able to speculate: they take nothing that limits it."""

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        return 0.8 if by_mlx and key[-1] == width else 1.0

    matmul_choice.tune("glu", large(), measure, lambda key, weight: steady_to)
    assert matmul_tuning.by_mlx("glu", SIZE, SIZE, width) == used
    assert matmul_tuning.exact_passes() == tuple(zip(WIDTHS, limits, strict=True))
    facts = GenerationFacts(99, 99, 4, 0, "none", "cpu", exact_passes=matmul_tuning.exact_passes())
    assert [facts.widest_pass(rows) for rows in (1, 8, 9, 32, 33, 64, 65)] == [
        *(limits[0],) * 2, *(limits[1],) * 2, *(limits[2],) * 2, 0
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "changes_at", "found"), [(8, 999, 256), (8, 1, 0), (8, 32, 8), (32, 128, 64)])
@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu"])
def test_steady_numbers_are_told_from_changing_ones(
    role: fused_matmul.Role, width: int, changes_at: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(functions: Any, role: str, x: mx.array, weight: Dense, rest: list[mx.array]) -> mx.array:
        assert rest[0].shape[0] == x.shape[0]
        out = mx.concatenate([x[row : row + 1] @ weight.weight.T for row in range(x.shape[0])])
        changed = x.shape[0] == 1 if changes_at == 1 else x.shape[0] >= changes_at
        return out * 1.001 if changed else out

    monkeypatch.setattr(matmul_choice, "_role", made)
    weight = Dense(mx.random.normal((8, 16), key=mx.random.key(1)))
    assert matmul_choice.steady((role, 8, 16, width), weight) == found


def test_a_pass_takes_the_choices_of_the_step_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight, x = mx.ones((64, 64), dtype=mx.bfloat16), mx.ones((40, 1, 64), dtype=mx.bfloat16)
    matmul_tuning.decide(("matmul", 64, 64, 64), True)
    matmul = BY_KERNELS.compile(BY_KERNELS.matmul)
    mx.eval(matmul(x, weight))
    assert not launched
    with matmul_tuning.as_step_of(8):
        mx.eval(matmul(x, weight))
    assert launched == ["matmul"], "another compiled function, by another choice"
    mx.eval(matmul(x, weight))
    assert launched == ["matmul"] and matmul_tuning.stands_for() is None


@pytest.mark.parametrize(("gain", "used"), [(0.1, True), (0.01, False)])
def test_the_shape_of_blocks_is_the_fastest_if_it_is_clearly_so(gain: float, used: bool) -> None:
    best = SHAPES[2]
    measured: list[BlockShape] = []

    def measure(weight: Weight, shape: BlockShape) -> float:
        measured.append(shape)
        return 1.0 - gain * (shape == best)

    matmul_choice.tune_shape(large(), measure)
    assert set(measured) == set(SHAPES)
    assert matmul_tuning.block_shape(large()) == (best if used else USUAL)
    assert matmul_tuning.block_shape(Dense(mx.zeros((64, 64)))) == USUAL, "weights of other sizes have their own"
    measured.clear()
    matmul_choice.tune_shape(large(), measure)
    assert not measured, "what is known is not measured again"


@pytest.mark.parametrize("packed", [False, True])
def test_a_shape_is_measured_with_its_own_blocks(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    monkeypatch.setattr(matmul_choice, "RUNS", 1)
    plain = mx.zeros((64, 128), dtype=mx.bfloat16)
    weight = Packed(*mx.quantize(plain, 64, 4), 4, 64) if packed else Dense(plain)
    assert matmul_choice.shape_seconds(weight, SHAPES[1]) > 0
    assert launched == ["matmul_add"] * matmul_choice.LAUNCHES, "traced once"
    assert not matmul_tuning.shape_known(matmul_tuning.size_of(weight)), "measuring decides nothing"


def test_a_shape_that_does_not_compile_leaves_the_usual_one(caplog: pytest.LogCaptureFixture) -> None:
    weight = large()

    def measure(weight: Weight, shape: BlockShape) -> float:
        if shape.walks:
            raise RuntimeError("told to")
        return 1.0

    matmul_choice.tune_shape(weight, measure)
    assert matmul_tuning.block_shape(weight) == USUAL
    assert "told to" in caplog.text


@pytest.fixture
def warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: True)
    monkeypatch.setattr(matmul_tilings, "multiprocessors", lambda: 132)


@pytest.mark.parametrize(("taken", "used"), [((0.9, 1.2, 0.5), True), ((1.3, 1.3, 0.5), False)])
def test_warp_groups_are_used_at_all_widths_or_at_none(taken: tuple[float, ...], used: bool, warpgroups: None) -> None:
    weight = small_matmul.prepare(large().weight)
    assert isinstance(weight, Dense)
    measured: list[bool] = []

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        measured.append(small_matmul.in_warpgroups(weight))
        return taken[WIDTHS.index(key[-1])] if measured[-1] else 1.0

    matmul_choice.tune_body("matmul_add", weight, measure)
    assert {True, False} == set(measured)
    assert small_matmul.in_warpgroups(weight) == used
    measured.clear()
    matmul_choice.tune_body("matmul_add", weight, measure)
    assert not measured, "what is known is not measured again"


def test_warp_groups_that_do_not_compile_are_not_used(warpgroups: None, caplog: pytest.LogCaptureFixture) -> None:
    weight = small_matmul.prepare(large().weight)
    assert isinstance(weight, Dense)

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        raise RuntimeError("told to")

    matmul_choice.tune_body("glu", weight, measure)
    assert not small_matmul.in_warpgroups(weight)
    assert "told to" in caplog.text


def test_without_warp_groups_nothing_is_measured() -> None:
    matmul_choice.tune_body("glu", large(), lambda *_: pytest.fail("measured"))


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose warps multiply in groups."""
    monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: True)
    monkeypatch.setattr(matmul_tilings, "multiprocessors", lambda: 132)


@pytest.mark.parametrize(
    ("rows", "widths"), [(64, ()), (65, MANY_WIDTHS[:1]), (128, MANY_WIDTHS[:1]), (129, MANY_WIDTHS)]
)
@pytest.mark.usefixtures("grouping")
def test_many_rows_are_measured_where_a_step_may_have_them(rows: int, widths: tuple[int, ...]) -> None:
    measured: list[int] = []

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        measured.append(key[-1])
        return 1.0

    weight = small_matmul.prepare(large())
    assert isinstance(weight, Dense)
    matmul_choice.tune_many("glu", weight, measure, lambda key, weight: True)
    matmul_tuning.expect_rows(rows)
    matmul_choice.tune_many("glu", weight, measure, lambda key, weight: True)
    assert set(measured) == set(widths)
    measured.clear()
    matmul_choice.tune_many("glu", weight, measure, lambda key, weight: True)
    assert not measured, "what is known is not measured again"
    assert matmul_tuning.many_by_kernel("glu", SIZE, SIZE, 100) == bool(widths)
    assert not matmul_tuning.many_by_kernel("qkv_rope", SIZE, SIZE, 100), "what was not measured is MLX's"


@pytest.mark.parametrize("trouble", ["slower", "wrong", "broken"])
@pytest.mark.usefixtures("grouping")
def test_mlx_computes_many_rows_where_the_kernel_is_no_good(trouble: str) -> None:
    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        if trouble == "broken" and not by_mlx:
            raise RuntimeError("cannot be launched")
        return 0.9 if by_mlx and trouble == "slower" else 1.0

    matmul_tuning.expect_rows(MOST_ROWS)
    weight = small_matmul.prepare(large())
    assert isinstance(weight, Dense)
    matmul_choice.tune_many("glu", weight, measure, lambda key, weight: trouble != "wrong")
    assert not any(matmul_tuning.many_by_kernel("glu", SIZE, SIZE, rows) for rows in (65, 128, 129, MOST_ROWS))


def test_a_kernel_agrees_if_its_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    play_matmul_kernels(monkeypatch, lambda name: None)
    weight = Dense((mx.random.normal((64, 64)) * 0.1).astype(mx.bfloat16))
    assert matmul_choice.agrees(("glu", 64, 64, 128), weight)
    right = small_matmul.glu
    monkeypatch.setattr(small_matmul, "glu", lambda *given, **named: right(*given, **named) * 1.05)
    assert not matmul_choice.agrees(("glu", 64, 64, 128), weight)
    monkeypatch.setattr(small_matmul, "glu", lambda *given, **named: right(*given, **named) * float("nan"))
    assert not matmul_choice.agrees(("glu", 64, 64, 128), weight)


@pytest.mark.usefixtures("grouping")
def test_a_step_of_many_rows_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight = small_matmul.prepare(mx.ones((64, 64), dtype=mx.bfloat16))
    x = mx.ones((100, 1, 64), dtype=mx.bfloat16)
    BY_KERNELS.matmul(x, weight)
    assert not launched, "nothing was measured"
    matmul_tuning.decide(("matmul", 64, 64, MANY_WIDTHS[0]), False)
    BY_KERNELS.matmul(x, weight)
    assert launched == ["matmul"]
    BY_KERNELS.matmul(x, Dense(weight.arrays[0]))
    assert launched == ["matmul"], "blocks that share a tile need counters"
    with matmul_tuning.as_step_of(4):
        BY_KERNELS.matmul(x, weight)
    assert launched == ["matmul"] * 2, "a pass stands for a step of few rows"
