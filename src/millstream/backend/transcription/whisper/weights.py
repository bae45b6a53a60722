"""Reads Whisper's tensors under one set of names, from any of the layouts that people have. Owner only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from millstream.errors import ModelError
from millstream.models.files import read_object
from millstream.models.whisper_files import weight_files

_NAMES = (
    (r"^model\.", ""),
    (r"^decoder\.embed_positions\.weight$", "decoder.positional_embedding"),
    (r"^encoder\.embed_positions\.weight$", "encoder.positional_embedding"),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.layers\.", ".blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.(fc1|mlp\.0)\.", ".mlp1."),
    (r"\.(fc2|mlp\.2)\.", ".mlp2."),
)
"""From the names of Hugging Face and of OpenAI's own files to those of MLX's converted ones."""


@dataclass(frozen=True, slots=True)
class Linear:
    weight: mx.array
    """Transposed: (inputs, outputs)."""
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight if self.bias is None else mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: mx.array
    bias: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, 1e-5)


class Weights:
    """The tensors of a model by their common names, in one dtype. Keeps those that were asked for."""

    def __init__(self, stored: Mapping[str, mx.array], dtype: mx.Dtype | None, quantization: Mapping[str, Any]) -> None:
        """`dtype`: None for the type of most of the weights."""
        self._stored = {_common(name): tensor for name, tensor in stored.items()}
        self.dtype = dtype or _float_type(stored)
        self._quantization = quantization
        self.used: list[mx.array] = []

    @classmethod
    def of(cls, folder: Path, dtype: mx.Dtype | None) -> Weights:
        stored: dict[str, mx.array] = {}
        for path in weight_files(folder):
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            stored |= loaded
        quantization = read_object(folder / "config.json").get("quantization")
        return cls(stored, dtype, quantization if isinstance(quantization, dict) else {})

    def has(self, name: str) -> bool:
        return name in self._stored

    def integers(self, name: str) -> list[list[int]]:
        """A small table of whole numbers, such as the heads that follow the speech; empty if there is none."""
        table = self._stored.get(name)
        if table is None or table.ndim != 2 or not mx.issubdtype(table.dtype, mx.integer):
            return []
        rows: Any = table.tolist()
        return [[int(value) for value in row] for row in rows]

    def tensor(self, name: str, *shape: int) -> mx.array:
        tensor = self._plain(name)
        if shape and tensor.shape != shape:
            raise ModelError(f"the tensor {name!r} has the shape {tensor.shape}; config.json says {shape}")
        return self._keep(tensor)

    def linear(self, *names: str) -> Linear:
        """One linear layer; of several names, their outputs side by side. A missing bias is 0: keys have none."""
        weights = [self._plain(f"{name}.weight") for name in names]
        biases = [
            self._plain(f"{name}.bias") if self.has(f"{name}.bias") else mx.zeros(weight.shape[0], self.dtype)
            for name, weight in zip(names, weights, strict=True)
        ]
        weight = mx.contiguous(mx.concatenate(weights).T)
        has_bias = any(self.has(f"{name}.bias") for name in names)
        return Linear(self._keep(weight), self._keep(mx.concatenate(biases)) if has_bias else None)

    def convolution(self, name: str) -> Linear:
        """A convolution over three frames as a matmul of three frames side by side."""
        weight = self._plain(f"{name}.weight")
        if weight.ndim != 3 or 3 not in weight.shape[1:]:
            raise ModelError(f"the tensor '{name}.weight' has the shape {weight.shape}; it must span three frames")
        if weight.shape[1] != 3:  # PyTorch has the frames last
            weight = weight.transpose(0, 2, 1)
        flat = mx.contiguous(weight.reshape(weight.shape[0], -1).T)
        return Linear(self._keep(flat), self.tensor(f"{name}.bias"))

    def norm(self, name: str) -> Norm:
        return Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"))

    def _keep(self, tensor: mx.array) -> mx.array:
        self.used.append(tensor)
        return tensor

    def _plain(self, name: str) -> mx.array:
        """The tensor, unpacked if it is quantised."""
        if name not in self._stored:
            raise ModelError(f"the weights have no tensor {name!r}")
        tensor = self._stored[name]
        base = name.removesuffix(".weight")
        if f"{base}.scales" in self._stored:
            settings = self._quantization
            tensor = mx.dequantize(
                tensor,
                self._stored[f"{base}.scales"],
                self._stored.get(f"{base}.biases"),
                group_size=settings.get("group_size", 64),
                bits=settings.get("bits", 4),
            )
        return tensor.astype(self.dtype)


def _common(name: str) -> str:
    for pattern, common in _NAMES:
        name = re.sub(pattern, common, name)
    return name


def _float_type(stored: Mapping[str, mx.array]) -> mx.Dtype:
    sizes: dict[mx.Dtype, int] = {}
    for tensor in stored.values():
        if mx.issubdtype(tensor.dtype, mx.floating):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else mx.float32
