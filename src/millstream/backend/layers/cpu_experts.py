"""Experts of half precision on the CPU, where MLX can multiply gathered matrices in float32 alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear


class FloatExperts(SwitchLinear):  # type: ignore[misc]
    """Weights in float32, inputs and outputs in the type of the model."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        out: mx.array = super().__call__(x.astype(mx.float32), indices, sorted_indices)
        return out.astype(x.dtype)


def keep_experts_in_float32(model: Any) -> int:
    """Every layer of experts that the CPU could not run otherwise; how many there are."""
    changed = 0
    for _, module in model.named_modules():
        if type(module) is SwitchLinear and module.weight.dtype != mx.float32:
            module.set_dtype(mx.float32)
            module.__class__ = FloatExperts
            changed += 1
    return changed
