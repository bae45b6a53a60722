"""How large a model becomes when its weights are unpacked."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from millstream.backend.weights.loading import _unpacked_numbers

WIDTHS = [2, 3, 4, 5, 6, 8]


class Small(nn.Module):
    """A layer of every kind that MLX quantises, and weights that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.linear = nn.Linear(64, 192)
        self.narrow = nn.Linear(192, 10, bias=False)
        self.norm = nn.RMSNorm(10)


def numbers(model: nn.Module) -> int:
    return sum(value.size for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", WIDTHS)
def test_packed_weights_are_counted_as_what_they_become(bits: int, group_size: int) -> None:
    model = Small()
    before = numbers(model)
    assert _unpacked_numbers(model) == before
    nn.quantize(model, group_size=group_size, bits=bits)
    packed, _, _ = mx.quantize(mx.zeros((192, 64)), group_size=group_size, bits=bits)
    assert model.linear.weight.shape == packed.shape == (192, 64 * bits // 32)
    assert _unpacked_numbers(model) == before
    dequantize_model(model)
    assert numbers(model) == before


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_numbers_with_a_point_are_counted_in_the_same_way(mode: str) -> None:
    model = Small()
    before = numbers(model)
    nn.quantize(model, mode=mode)
    assert _unpacked_numbers(model) == before


def test_layers_of_several_widths() -> None:
    model = Small()
    before = numbers(model)
    widths = {"embedding": 6, "linear": 3, "narrow": 8}
    nn.quantize(model, class_predicate=lambda path, _: path in widths and {"group_size": 32, "bits": widths[path]})
    assert _unpacked_numbers(model) == before
