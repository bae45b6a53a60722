"""The kernels of expert layers against their MLX reference in float32. Skipped where there is no CUDA."""

from __future__ import annotations

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, Packing, expert_down, expert_glu
from millstream.backend.kernels.expert_routing import Routed, Router, Routing, combine, new_counter, route, route_many
from millstream.backend.kernels.expert_tiles import sort_choices, tiled_down, tiled_glu
from millstream.backend.layers import expert_ops

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda",
    reason="compares CUDA kernels with formulas: needs MLX's CUDA build and an NVIDIA GPU",
)

EXPERTS, SLOTS, SIZE, HIDDEN = 24, 3, 256, 128
PACKINGS = [
    None,
    Packing(4, 64, "affine"),
    Packing(4, 32, "affine"),
    Packing(8, 128, "affine"),
    Packing(4, 32, "mxfp4"),
    Packing(8, 32, "mxfp8"),
]


def random_weights(outputs: int, inputs: int, packing: Packing | None) -> tuple[ExpertWeights, ExpertWeights]:
    """The weights, and the same numbers dense in float32."""
    weight = (mx.random.normal((EXPERTS, outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
    bias = mx.random.normal((EXPERTS, outputs)).astype(mx.bfloat16)
    if packing is None:
        plain, arrays = weight, (weight,)
    else:
        how = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
        arrays = tuple(mx.quantize(weight, **how))  # type: ignore[arg-type]
        plain = mx.dequantize(*arrays, **how)  # type: ignore[arg-type]
    dense = ExpertWeights((plain.astype(mx.float32),), None, bias.astype(mx.float32))
    return ExpertWeights(arrays, packing, bias), dense


def choices(rows: int) -> mx.array:
    """Distinct experts for each row; none for the second."""
    keys = mx.random.uniform(shape=(rows, EXPERTS))
    indices = mx.argsort(keys, axis=-1)[:, :SLOTS].astype(mx.int32)
    return mx.where(mx.arange(rows)[:, None] == 1, -1, indices)


def close(got: mx.array, expected: mx.array, tolerance: float = 0.02) -> bool:
    return bool((mx.abs(got.astype(mx.float32) - expected).max() <= tolerance * mx.abs(expected).max()).item())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rows", [1, 9, 64, 300])
@pytest.mark.parametrize("activation", [Activation("silu"), Activation("clipped")])
def test_experts(packing: Packing | None, rows: int, activation: Activation) -> None:
    mx.random.seed(rows)
    x, indices = mx.random.normal((rows, SIZE)).astype(mx.bfloat16), choices(rows)
    (gate, gate32), (up, up32) = (random_weights(HIDDEN, SIZE, packing) for _ in range(2))
    down, down32 = random_weights(SIZE, HIDDEN, packing)
    chosen = indices.reshape(-1, 1) >= 0
    hidden = mx.where(chosen, expert_glu(x, indices, gate, up, activation), 0)
    expected = mx.where(chosen, expert_ops.glu(x.astype(mx.float32), indices, gate32, up32, activation), 0)
    assert close(hidden, expected)
    out = mx.where(chosen, expert_down(hidden, indices, down), 0)
    assert close(out, mx.where(chosen, expert_ops.down(hidden.astype(mx.float32), indices, down32), 0))
    if rows == 64:
        alone = expert_glu(x[7:8], indices[7:8], gate, up, activation)
        assert mx.array_equal(alone, hidden[7 * SLOTS : 8 * SLOTS]).item(), "a row's numbers depend on its neighbours"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rows", [3, 70, 1500])
@pytest.mark.parametrize("activation", [Activation("silu"), Activation("clipped")])
def test_experts_of_many_rows(packing: Packing | None, rows: int, activation: Activation) -> None:
    mx.random.seed(rows)
    x, indices = mx.random.normal((rows, SIZE)).astype(mx.bfloat16), choices(rows)
    (gate, gate32), (up, up32) = (random_weights(HIDDEN, SIZE, packing) for _ in range(2))
    down, down32 = random_weights(SIZE, HIDDEN, packing)
    by_expert = sort_choices(indices, EXPERTS)
    flat: list[int] = indices.flatten().tolist()  # type: ignore[assignment]
    wanted = [entry for expert in range(EXPERTS) for entry, each in enumerate(flat) if each == expert]
    assert by_expert.order.tolist()[: len(wanted)] == wanted
    assert by_expert.starts.tolist() == [sum(0 <= each < expert for each in flat) for expert in range(EXPERTS + 1)]
    order = mx.array(wanted)
    hidden = tiled_glu(x, by_expert, gate, up, activation)
    expected = expert_ops.glu(x.astype(mx.float32), indices, gate32, up32, activation)
    assert close(hidden[: len(wanted)], expected[order])
    hidden32 = mx.zeros((len(flat), HIDDEN))
    hidden32[order] = hidden[: len(wanted)].astype(mx.float32)
    out = tiled_down(hidden, by_expert, down)
    assert close(out[order], expert_ops.down(hidden32, indices, down32)[order])
    if rows == 70:
        few = sort_choices(indices[:9], EXPERTS)
        alone = tiled_down(tiled_glu(x[:9], few, gate, up, activation), few, down)
        chosen = indices[:9].reshape(-1, 1) >= 0
        same = mx.where(chosen, alone == out[: 9 * SLOTS], True)
        assert mx.all(same).item(), "a row's numbers depend on its neighbours"


@pytest.mark.parametrize(
    ("routing", "corrected", "gated"),
    [
        (Routing(EXPERTS, SLOTS, "softmax", normalised=True), False, False),
        (Routing(EXPERTS, SLOTS, "softmax", scale=16.0, groups=4, best_groups=2), False, True),
        (Routing(EXPERTS, SLOTS, "softmax_chosen"), False, False),
        (Routing(EXPERTS, SLOTS, "sigmoid", True, 0.0, 2.5, 4, 2, "best_two"), True, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 20])
def test_routing(routing: Routing, corrected: bool, gated: bool, rows: int) -> None:
    mx.random.seed(rows)
    # Far apart, so that no rounding decides a choice.
    weight = mx.random.normal((EXPERTS + gated, SIZE)) * 0.2
    correction = mx.random.normal((EXPERTS,)) * 0.1 if corrected else None
    router = Router(weight.astype(mx.bfloat16), new_counter(rows), correction=correction)
    x = mx.random.normal((rows, 1, SIZE)).astype(mx.bfloat16)
    norm = (mx.random.uniform(0.5, 1.5, (SIZE,)).astype(mx.bfloat16), 1e-6)
    live = mx.array([row % 5 - 1 for row in range(rows)], dtype=mx.int32)
    for vacant in (None, live):
        got = route(x, router, routing, norm, vacant)
        expected = expert_ops.route(x, router, routing, norm, vacant)
        assert close(got.x, expected.x.astype(mx.float32), 0.01)
        order, other = mx.argsort(got.indices, axis=-1), mx.argsort(expected.indices, axis=-1)
        same = mx.all(
            mx.take_along_axis(got.indices, order, -1) == mx.take_along_axis(expected.indices, other, -1), axis=-1
        )
        assert same.sum().item() >= 0.8 * rows
        weights = mx.take_along_axis(got.weights, order, -1) - mx.take_along_axis(expected.weights, other, -1)
        compared = same[:, None] & (got.indices >= 0)
        assert mx.where(compared, mx.abs(weights), 0).max().item() < 0.05 * routing.scale
        assert (got.shared is not None) is gated
        many = route_many(got.x.reshape(rows, SIZE), router, routing)
        assert mx.array_equal(many.weights, got.weights).item(), "steps and passes route alike"
        assert mx.all((many.indices == got.indices) | (got.indices < 0)).item()
    assert router.count.sum().item() == 0, "the counters are set back"


@pytest.mark.parametrize("shared", [False, True])
def test_the_sum_over_experts(shared: bool) -> None:
    mx.random.seed(3)
    indices = choices(17)
    y = mx.random.normal((17 * SLOTS, SIZE)).astype(mx.bfloat16)
    y = mx.where(indices.reshape(-1, 1) < 0, float("nan"), y).astype(mx.bfloat16)
    gate = mx.random.uniform(shape=(17,)) if shared else None
    routed = Routed(mx.zeros((17, 1, SIZE)), indices, mx.random.uniform(shape=(17, SLOTS)), gate)
    other, residual = (mx.random.normal((17, 1, SIZE)).astype(mx.bfloat16) for _ in range(2))
    got = combine(y, routed, other if shared else None, residual)
    y32, other32, residual32 = (each.astype(mx.float32) for each in (mx.where(mx.isnan(y), 0, y), other, residual))
    assert close(got, expert_ops.combine(y32, routed, other32 if shared else None, residual32))
