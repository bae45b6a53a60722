"""Mixture-of-experts layers on the CPU, where MLX has gathered matmuls for float32 only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear


class Float32Experts(SwitchLinear):  # type: ignore[misc]
    """Weights in float32; inputs and outputs in the type of the model."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        out: mx.array = super().__call__(x.astype(mx.float32), indices, sorted_indices)
        return out.astype(x.dtype)


def use_float32_experts(model: Any) -> int:
    """Convert every expert layer of half precision. Returns how many there are."""
    changed = 0
    for _, module in model.named_modules():
        if type(module) is SwitchLinear and module.weight.dtype != mx.float32:
            module.set_dtype(mx.float32)
            module.__class__ = Float32Experts
            changed += 1
    return changed
