"""Fused matmuls by MLX against formulas, and weights as the arguments of compiled functions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.kernels.weights import Dense, Norm, Packed, Weight
from millstream.backend.layers.fused_matmul import BY_MLX, Activation

SIZE, COUNT, ROWS = 64, 96, 3


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def normed(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


ACTIVATED: dict[Activation, Any] = {
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu_tanh": lambda gate, up: 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up,
    "clipped": lambda gate, up: np.minimum(gate, 7) * sigmoid(1.702 * np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1),
}


def both_forms() -> list[Weight]:
    plain = mx.array(random(COUNT, SIZE))
    packed, scales, biases = mx.quantize(plain, 32, 4)
    return [Dense(plain), Packed(packed, scales, biases, 4, 32)]


def numbers(weight: Weight) -> Any:
    if isinstance(weight, Dense):
        return np.array(weight.weight)
    return np.array(mx.dequantize(weight.packed, weight.scales, weight.biases, weight.group_size, weight.bits))


@pytest.mark.parametrize("weight", both_forms(), ids=["dense", "packed"])
def test_products_with_what_stands_before_and_after(weight: Weight) -> None:
    x, bias, residual, scale = random(ROWS, 1, SIZE), random(COUNT), random(ROWS, 1, COUNT), 1 + random(SIZE)
    product = normed(x, scale, 1e-5) @ numbers(weight).T + bias
    more = {"bias": mx.array(bias), "norm": Norm(mx.array(scale), 1e-5)}
    close(BY_MLX.matmul(mx.array(x), weight, **more), product)
    close(BY_MLX.matmul(mx.array(x), weight), x @ numbers(weight).T)
    close(BY_MLX.matmul_add(mx.array(x), weight, mx.array(residual), factor=0.5, **more), residual + 0.5 * product)
    close(BY_MLX.matmul_add(mx.array(x), weight, mx.array(residual)), residual + x @ numbers(weight).T)
    gate, up = np.split(product * 3, 2, axis=-1)
    for activation, formula in ACTIVATED.items():
        got = BY_MLX.glu(mx.array(x), weight, activation=activation, **more)
        close(got, formula(gate / 3, up / 3))


def test_part_of_a_head_is_turned() -> None:
    heads, groups, head, turned = 2, 1, 24, 16
    x, offset = random(ROWS, 1, SIZE), np.array([0, 5, 900])
    scales = 1 + random(head)
    periods = 100.0 ** (np.arange(0, turned, 2) / turned)
    head_norm = Norm(mx.array(scales), 1e-6)
    got = BY_MLX.qkv_rope(
        mx.array(x),
        Dense(mx.array(random(COUNT, SIZE))),
        mx.array(offset.astype(np.int32)),
        mx.array(periods.astype(np.float32)),
        heads,
        groups,
        head,
        q_norm=head_norm,
        k_norm=head_norm,
        factor=1.5,
    )
    joined = (x @ random(COUNT, SIZE).T).reshape(ROWS, 4, 1, head)
    for number, out in enumerate((got[0][:, :1], got[0][:, 1:], got[1])):
        expected = normed(joined[:, number : number + 1], scales, 1e-6)
        one, two = expected[..., : turned // 2] * 1.5, expected[..., turned // 2 : turned] * 1.5
        angle = (offset[:, None] / periods)[:, None, None]
        expected[..., : turned // 2] = one * np.cos(angle) - two * np.sin(angle)
        expected[..., turned // 2 : turned] = one * np.sin(angle) + two * np.cos(angle)
        close(out, expected)
    close(got[2], joined[:, 3:])


def test_a_norm_before_a_residual() -> None:
    x, residual, scale, other = random(ROWS, 1, SIZE), random(1, ROWS, SIZE), 1 + random(SIZE), 2 + random(SIZE)
    residual = residual.reshape(x.shape)
    norm, after = Norm(mx.array(scale), 1e-5), Norm(mx.array(other), 1e-6)
    expected = residual + normed(x, scale, 1e-5)
    close(BY_MLX.norm_add(mx.array(x), norm, mx.array(residual)), expected)
    out, second = BY_MLX.norm_add(mx.array(x), norm, mx.array(residual), after=after)
    close(out, expected)
    close(second, normed(expected, other, 1e-6))


def test_weights_are_arguments_of_compiled_functions() -> None:
    x = mx.array(random(ROWS, 1, SIZE))
    tickets = mx.zeros((4,), dtype=mx.uint32)
    plain, packed = both_forms()
    assert isinstance(plain, Dense) and isinstance(packed, Packed)
    counted = Packed(packed.packed, packed.scales, None, 4, 32, "mxfp4", tickets)
    for weight in (plain, packed, Dense(plain.weight, tickets), counted):
        assert weight.form.count == len(weight.arrays)
        again = weight.form.of(weight.arrays)
        assert again == weight and hash(again.form) == hash(weight.form)
        assert (weight.outputs, weight.inputs) == (COUNT, SIZE)
    for weight in (plain, packed):
        form = weight.form
        compiled = mx.compile(lambda x, *arrays, form=form: BY_MLX.matmul(x, form.of(arrays)))
        close(compiled(x, *weight.arrays), np.array(BY_MLX.matmul(x, weight)))


def close(got: mx.array, expected: Any) -> None:
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-4)
