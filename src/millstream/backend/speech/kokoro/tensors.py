"""Kokoro's tensors by name, in the layouts of PyTorch and of mlx-audio. Owner only."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from millstream.errors import ModelError

_OTHER_NAMES = (
    ("weight_ih_l0_reverse", "Wx_backward"),
    ("weight_hh_l0_reverse", "Wh_backward"),
    ("weight_ih_l0", "Wx_forward"),
    ("weight_hh_l0", "Wh_forward"),
    ("bias_ih_l0_reverse", "bias_ih_backward"),
    ("bias_hh_l0_reverse", "bias_hh_backward"),
    ("bias_ih_l0", "bias_ih_forward"),
    ("bias_hh_l0", "bias_hh_forward"),
    ("gamma", "weight"),
    ("beta", "bias"),
    ("weight_g", "parametrizations.weight.original0"),
    ("weight_v", "parametrizations.weight.original1"),
)
"""The last part of a name in PyTorch, and what else it is called."""


class Tensors:
    """Converts to one dtype, and keeps what was asked for."""

    def __init__(self, stored: Mapping[str, mx.array], dtype: mx.Dtype) -> None:
        self._stored = stored
        self.dtype = dtype
        self.used: list[mx.array] = []

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def plain(self, name: str) -> mx.array:
        """As it is stored, in float32, for those who compute with it before it is kept."""
        found = self._find(name)
        if found is None:
            raise ModelError(f"the weights have no tensor {name!r}")
        return self._stored[found].astype(mx.float32)

    def keep(self, value: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
        value = mx.contiguous(value.astype(dtype or self.dtype))
        self.used.append(value)
        return value

    def tensor(self, name: str) -> mx.array:
        return self.keep(self.plain(name))

    def convolution(self, name: str, kernel: int) -> mx.array:
        """The weight of a convolution in float32, weight normalisation folded: (first, second, kernel) as PyTorch has
        it. mlx-audio stores (first, kernel, second)."""
        if self.has(f"{name}.weight_v"):
            v, g = self._oriented(f"{name}.weight_v", kernel), self.plain(f"{name}.weight_g")
            norm = mx.sqrt(mx.sum(mx.square(v), axis=(1, 2), keepdims=True))
            return v * (g.reshape(-1, 1, 1) / norm)
        return self._oriented(f"{name}.weight", kernel)

    def _oriented(self, name: str, kernel: int) -> mx.array:
        weight = self.plain(name)
        if weight.ndim == 3 and weight.shape[2] == kernel:
            return weight
        if weight.ndim == 3 and weight.shape[1] == kernel:
            return weight.transpose(0, 2, 1)
        raise ModelError(f"the tensor {name!r} has the shape {weight.shape}, which has no kernel of {kernel}")

    def _find(self, name: str) -> str | None:
        if name in self._stored:
            return name
        for ours, other in _OTHER_NAMES:
            if name.endswith(f".{ours}") and (found := f"{name.removesuffix(ours)}{other}") in self._stored:
                return found
        return None
