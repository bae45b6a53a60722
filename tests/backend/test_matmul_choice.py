"""What computes a large weight's products is chosen by measuring: shapes of blocks, or MLX's operations."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from millstream.backend.kernels import matmul_tilings, matmul_tuning
from millstream.backend.kernels.matmul_tilings import WIDTHS
from millstream.backend.kernels.matmul_tuning import Choice, Key
from millstream.backend.kernels.weights import Dense
from millstream.backend.layers import fused_matmul, matmul_choice
from millstream.backend.layers.fused_matmul import BY_KERNELS
from support.matmul_kernels import play_matmul_kernels

SIZE = 4096


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tuning, "_chosen", {})


def large() -> Dense:
    return Dense(mx.zeros((SIZE, SIZE), dtype=mx.bfloat16))


def taking(times: dict[Choice, float], other: float = 2.0) -> Callable[[Key, Dense, Choice], float]:
    return lambda key, weight, choice: times.get(choice, other)


def test_the_fastest_blocks_are_used() -> None:
    fastest = {width: matmul_tilings.candidates(SIZE, SIZE, width)[-1] for width in WIDTHS}
    measured: list[Key] = []

    def measure(key: Key, weight: Dense, choice: Choice) -> float:
        measured.append(key)
        return 1.0 if choice == fastest[key[-1]] else 2.0

    matmul_choice.tune("glu", large(), measure)
    assert {key[-1] for key in measured} == set(WIDTHS)
    for width, tiling in fastest.items():
        assert matmul_tuning.tiling_for("glu", SIZE, SIZE, width) == tiling
        assert matmul_tuning.tiling_for("matmul", SIZE, SIZE, width) == matmul_tilings.candidates(SIZE, SIZE, width)[0]
    measured.clear()
    matmul_choice.tune("glu", large(), measure)
    assert not measured, "what is known is not measured again"


@pytest.mark.parametrize(("mlx", "used"), [(0.8, True), (0.95, False)])
def test_mlx_is_used_where_it_is_clearly_faster(mlx: float, used: bool) -> None:
    usual = matmul_tilings.candidates(SIZE, SIZE, 64)[0]
    matmul_choice.tune("matmul_add", large(), taking({"mlx": mlx, usual: 1.0}, 0.97))
    assert matmul_tuning.by_mlx("matmul_add", SIZE, SIZE, 40) == used
    assert matmul_tuning.tiling_for("matmul_add", SIZE, SIZE, 64) == usual, "hardly faster is no reason"
    assert not matmul_tuning.by_mlx("glu", SIZE, SIZE, 40)


def test_small_weights_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "seconds", None)
    BY_KERNELS.prepare(mx.zeros((64, 64), dtype=mx.bfloat16), "glu")
    BY_KERNELS.prepare(mx.zeros((SIZE, SIZE), dtype=mx.bfloat16))
    assert matmul_tuning._chosen == {}


@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu"])
def test_whole_forms_are_measured(role: fused_matmul.Role, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    monkeypatch.setattr(matmul_choice, "COPIES_BYTES", 3 * 64 * 64 * 2)
    weight = Dense(mx.zeros((64, 64), dtype=mx.bfloat16))
    key: Key = (role, 64, 64, 8)
    assert matmul_choice.seconds(key, weight, "mlx") > 0 and not launched
    for tiling in matmul_tilings.candidates(64, 64, 8):
        launched.clear()
        assert matmul_choice.seconds(key, weight, tiling) > 0
        assert launched == [role] * matmul_choice.LAUNCHES
    assert matmul_tuning.choice(key) is None, "measuring decides nothing"


def test_a_call_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight, x = mx.ones((64, 64), dtype=mx.bfloat16), mx.ones((20, 1, 64), dtype=mx.bfloat16)
    matmul_tuning.choose(("matmul", 64, 64, 32), "mlx")
    assert mx.array_equal(BY_KERNELS.matmul(x, weight), x @ weight.T).item() and not launched
    assert mx.array_equal(BY_KERNELS.matmul(x[:8], weight), x[:8] @ weight.T).item() and launched == ["matmul"]
