"""Parts that encoders are made of, built from a model's tensors by name. Owner only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.encoders.families.operations import MLX, Activation, Operations
from millstream.errors import ModelError

_OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))
"""LayerNorms of BERT's first release."""


@dataclass(frozen=True, slots=True)
class Linear:
    weight: mx.array
    bias: mx.array | None
    operations: Operations

    def __call__(self, x: mx.array) -> mx.array:
        return self.operations.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: mx.array | None
    bias: mx.array | None
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


class Tensors:
    """A model's tensors by name, in one dtype. Keeps those that were asked for."""

    def __init__(
        self,
        tensors: Mapping[str, mx.array],
        dtype: mx.Dtype,
        quantization: Mapping[str, Any] | None,
        operations: Operations = MLX,
    ) -> None:
        self.operations = operations
        self._tensors = {_modern(name): tensor for name, tensor in tensors.items()}
        self._dtype = dtype
        self._quantization = quantization
        self.used: list[mx.array] = []

    def find_prefix(self, prefixes: Sequence[str], name: str) -> str:
        """The prefix with which `name` exists: the same model is published with and without its class's name."""
        for prefix in ("", *prefixes):
            if f"{prefix}{name}" in self._tensors:
                return prefix
        raise ModelError(f"the weights have no tensor {name!r}")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> mx.array:
        if name not in self._tensors:
            raise ModelError(f"the weights have no tensor {name!r}")
        return self._keep(self._plain(name))

    def linear(self, *names: str) -> Linear:
        """One linear layer; of several names, their outputs side by side."""
        weights = [self._plain(f"{name}.weight") for name in names]
        biases = [self._plain(f"{name}.bias") for name in names if f"{name}.bias" in self._tensors]
        if biases and len(biases) < len(names):
            raise ModelError(f"the weights have biases for some of {', '.join(names)}, but not for all")
        weight = weights[0] if len(weights) == 1 else mx.concatenate(weights)
        bias = None if not biases else self._keep(mx.concatenate(biases))
        return Linear(self._keep(weight), bias, self.operations)

    def norm(self, name: str, eps: float) -> LayerNorm:
        weight, bias = (
            self._keep(self._plain(full)) if (full := f"{name}.{part}") in self._tensors else None
            for part in ("weight", "bias")
        )
        if weight is None:
            raise ModelError(f"the weights have no tensor '{name}.weight'")
        return LayerNorm(weight, bias, eps)

    def _keep(self, tensor: mx.array) -> mx.array:
        self.used.append(tensor)
        return tensor

    def _plain(self, name: str) -> mx.array:
        """The tensor, unpacked if it is quantised: encoders are small."""
        if name not in self._tensors:
            raise ModelError(f"the weights have no tensor {name!r}")
        tensor = self._tensors[name]
        base = name.removesuffix(".weight")
        if f"{base}.scales" in self._tensors:
            settings = self._quantization or {}
            tensor = mx.dequantize(
                tensor,
                self._tensors[f"{base}.scales"],
                self._tensors.get(f"{base}.biases"),
                group_size=settings.get("group_size"),
                bits=settings.get("bits"),
                mode=settings.get("mode", "affine"),
            )
        return tensor.astype(self._dtype)


def _modern(name: str) -> str:
    for old, new in _OLD_NAMES:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def split_heads(x: mx.array, heads: int) -> mx.array:
    rows, length, width = x.shape
    return x.reshape(rows, length, heads, width // heads).transpose(0, 2, 1, 3)


def attend(
    operations: Operations, qkv: mx.array, heads: int, mask: mx.array | None, rotate: Activation | None = None
) -> mx.array:
    """Attention over fused projections. `mask`: True or a number to add for each pair of positions."""
    rows, length, width = qkv.shape
    queries, keys, values = (split_heads(part, heads) for part in mx.split(qkv, 3, axis=-1))
    if rotate is not None:
        queries, keys = rotate(queries), rotate(keys)
    scale = (width // 3 // heads) ** -0.5
    attended = operations.attention(queries, keys, values, scale, mask)
    return attended.transpose(0, 2, 1, 3).reshape(rows, length, width // 3)


def arrays_of(parts: Iterable[Tensors]) -> list[mx.array]:
    return [array for tensors in parts for array in tensors.used]
