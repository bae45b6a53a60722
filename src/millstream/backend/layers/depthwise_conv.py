"""Short depthwise convolutions as weighted sums of shifted inputs.

MLX's own take four to eight times as long on a CPU. On CUDA they are meant to spare what a new shape may cost a library
of convolutions: that was not measured by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MOST_TAPS = 8
"""Beyond, there would be more launches than a convolution is worth. Hybrids have 3 or 4."""


@dataclass(frozen=True, eq=False)
class _Taps:
    """The weights of each tap, for all channels. Cut once: each operation costs a GPU's host as much as a launch."""

    weights: tuple[mx.array, ...]


class DepthwiseConv(nn.Conv1d):  # type: ignore[misc]
    """An `nn.Conv1d` of one group per channel, without stride, padding or dilation, whose weights stay as they are."""

    taps: _Taps

    def __call__(self, x: mx.array) -> mx.array:
        weights = self.taps.weights
        length = x.shape[1] - len(weights) + 1
        shifted = [x[:, tap : tap + length] for tap in range(len(weights))]
        out: mx.array = _weighted_sum(shifted, weights)
        return out + self.bias if "bias" in self else out


def _sum(shifted: Sequence[mx.array], weights: Sequence[mx.array]) -> mx.array:
    """In float32, as a convolution adds up."""
    total = shifted[0].astype(mx.float32) * weights[0].astype(mx.float32)
    for each, weight in zip(shifted[1:], weights[1:], strict=True):
        total = total + each.astype(mx.float32) * weight.astype(mx.float32)
    return total.astype(shifted[0].dtype)


_weighted_sum = mx.compile(_sum, shapeless=True)


def replace_depthwise(model: Any) -> int:
    """Have the short convolutions of a model computed so. Returns how many there are."""
    found = [module for _, module in model.named_modules() if type(module) is nn.Conv1d and _is_depthwise(module)]
    for module in found:
        module.__class__ = DepthwiseConv
        module.taps = _Taps(tuple(mx.contiguous(module.weight[:, tap, 0]) for tap in range(module.weight.shape[1])))
    return len(found)


def _is_depthwise(conv: Any) -> bool:
    channels, taps, each = conv.weight.shape
    plain = (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    return bool(plain and conv.groups == channels and each == 1 and 1 < taps <= MOST_TAPS)
