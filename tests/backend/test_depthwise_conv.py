"""Short convolutions as weighted sums: the numbers of `nn.Conv1d`, and which convolutions are replaced."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from millstream.backend.layers.depthwise_conv import MOST_TAPS, DepthwiseConv, replace_depthwise
from millstream.backend.weights.materialize import reachable_arrays


class Holder(nn.Module):  # type: ignore[misc]
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.inner = [conv]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("taps", "shape"), [(2, (1, 2, 8)), (3, (2, 70, 24)), (4, (5, 4, 16)), (8, (1, 31, 8))])
def test_it_gives_the_same_numbers(taps: int, shape: tuple[int, int, int], bias: bool, dtype: mx.Dtype) -> None:
    conv = nn.Conv1d(shape[2], shape[2], taps, groups=shape[2], bias=bias)
    conv.weight = mx.random.normal(conv.weight.shape)
    if bias:
        conv.bias = mx.random.normal(conv.bias.shape)
    conv.set_dtype(dtype)
    x = mx.random.normal(shape).astype(dtype)
    expected = conv(x)
    mx.eval(expected)
    holder = Holder(conv)
    parameters = [name for name, _ in tree_flatten(holder.parameters())]
    assert replace_depthwise(holder) == 1 and type(conv) is DepthwiseConv
    assert [name for name, _ in tree_flatten(holder.parameters())] == parameters
    assert len(list(reachable_arrays(holder))) == len(parameters) + taps, "a load evaluates them"
    found = conv(x)
    assert found.dtype == dtype and found.shape == expected.shape
    within = float(mx.finfo(dtype).eps) * 4 * taps  # both add up in float32, each in its own order
    assert mx.allclose(found, expected, rtol=within, atol=within).item()


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(8, 8, 3),
        nn.Conv1d(8, 8, 3, groups=4),
        nn.Conv1d(8, 16, 3, groups=8),
        nn.Conv1d(8, 8, 3, groups=8, padding=1),
        nn.Conv1d(8, 8, 3, groups=8, stride=2),
        nn.Conv1d(8, 8, 3, groups=8, dilation=2),
        nn.Conv1d(8, 8, 1, groups=8),
        nn.Conv1d(8, 8, MOST_TAPS + 1, groups=8),
    ],
    ids=["one group", "few groups", "more outputs", "padding", "stride", "dilation", "one tap", "many taps"],
)
def test_others_stay_as_they_are(conv: nn.Conv1d) -> None:
    assert replace_depthwise(Holder(conv)) == 0 and type(conv) is nn.Conv1d
