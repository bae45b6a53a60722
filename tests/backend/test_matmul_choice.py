"""What computes a large weight's products is chosen by measuring: our kernel, or MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tuning
from millstream.backend.kernels.matmul_tilings import SHAPES, USUAL, WIDTHS, BlockShape
from millstream.backend.kernels.matmul_tuning import Key
from millstream.backend.kernels.weights import Dense, Norm, Packed, Weight
from millstream.backend.layers import fused_matmul, matmul_choice, matmul_reference
from millstream.backend.layers.fused_matmul import BY_KERNELS
from support.matmul_kernels import play_matmul_kernels

SIZE = 4096


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tuning, "_by_mlx", {})
    monkeypatch.setattr(matmul_tuning, "_shapes", {})
    monkeypatch.setattr(matmul_tuning, "_unsteady", set())


def steady(key: Key, weight: Dense) -> bool:
    return True


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


@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu"])
def test_whole_forms_are_measured(role: fused_matmul.Role, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    monkeypatch.setattr(matmul_choice, "COPIES_BYTES", 3 * 64 * 64 * 2)
    key: Key = (role, 64, 64, 8)
    weight = Dense(mx.zeros((64, 64), dtype=mx.bfloat16))
    assert matmul_choice.seconds(key, weight, True) > 0 and not launched
    assert matmul_choice.seconds(key, weight, False) > 0
    assert launched == [role] * matmul_choice.LAUNCHES
    assert not matmul_tuning.known(key), "measuring decides nothing"


def test_a_call_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight, x = mx.ones((64, 64), dtype=mx.bfloat16), mx.ones((20, 1, 64), dtype=mx.bfloat16)
    matmul_tuning.decide(("matmul", 64, 64, 32), True)
    assert mx.array_equal(BY_KERNELS.matmul(x, weight), x @ weight.T).item() and not launched
    assert mx.array_equal(BY_KERNELS.matmul(x[:8], weight), x[:8] @ weight.T).item() and launched == ["matmul"]


@pytest.mark.parametrize(
    ("width", "mlx", "used", "limits"),
    [(8, 0.5, False, (64, 256)), (32, 0.8, False, (64, 256)), (32, 0.7, True, (8, 256)), (64, 0.85, True, (32, 256))],
)
def test_mlx_must_be_much_faster_if_its_numbers_depend_on_the_width(
    width: int, mlx: float, used: bool, limits: tuple[int, int]
) -> None:
    """Rows whose answer it computes do not speculate then, so few rows never get it."""

    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        return mlx if by_mlx and key[-1] == width else 1.0

    matmul_choice.tune("glu", large(), measure, lambda key, weight: False)
    assert matmul_tuning.by_mlx("glu", SIZE, SIZE, width) == used
    assert matmul_tuning.exact_limits() == limits


def test_where_mlx_gives_the_same_numbers_passes_may_be_as_wide_as_was_tried() -> None:
    def measure(key: Key, weight: Dense, by_mlx: bool) -> float:
        return 0.8 if by_mlx and key[-1] == 32 else 1.0

    matmul_choice.tune("glu", large(), measure, steady)
    assert matmul_tuning.exact_limits() == (64, 64)


@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu"])
def test_steady_numbers_are_told_from_changing_ones(role: fused_matmul.Role, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Dense(mx.random.normal((64, 128), key=mx.random.key(1)))
    product, asked = matmul_reference.product, []

    def by_rows(x: mx.array, weight: Dense, bias: mx.array | None = None, norm: Norm | None = None) -> mx.array:
        asked.append(x.shape[0])
        return mx.concatenate([product(x[row : row + 1], weight, bias, norm) for row in range(x.shape[0])])

    monkeypatch.setattr(matmul_reference, "product", by_rows)
    monkeypatch.setattr(matmul_reference.mx, "addmm", lambda c, a, b: c + by_rows(a, Dense(b.T)))
    assert matmul_choice.steady((role, 64, 128, 8), weight)
    assert asked == [1, 8, 32, 64]
    monkeypatch.setattr(
        matmul_reference, "product", lambda x, *rest: by_rows(x, *rest) * (1.001 if x.shape[0] > 32 else 1.0)
    )
    monkeypatch.setattr(matmul_reference.mx, "addmm", lambda c, a, b: c + matmul_reference.product(a, Dense(b.T)))
    assert not matmul_choice.steady((role, 64, 128, 32), weight)


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
